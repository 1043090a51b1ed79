"""Picks the next configs of all cells at once, from samples of what they may turn out to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


@dataclass(eq=False)
class Shortlist:
    """The configs of one cell that are worth a look.

    Attributes:
        cell: Index of the cell.
        configs: Indices of configs, int64 [n].
        samples: log(time / what would just be an improvement), float64 [n, samples]: under 0 is better.
        weight: What an improvement in the log is worth, float64 [n]: the share of the batch size's sum.
        current: The best so far in each sample, float64 [samples]; 0 where there is an incumbent.
        quota: How many to pick.
        chosen: Positions in ``configs`` picked so far.
    """

    cell: int
    configs: Ints
    samples: Floats
    weight: Floats
    current: Floats
    quota: int
    chosen: list[int] = field(default_factory=list)

    def gains(self) -> Floats:
        """Expected improvement by each config on the incumbent and those chosen, float64 [n]; chosen ones -1."""
        out = self.weight * np.maximum(self.current - self.samples, 0.0).mean(axis=1)
        out[self.chosen] = -1.0
        return np.asarray(out)

    def choose(self, position: int) -> None:
        """Takes a config into the batch."""
        self.chosen.append(position)
        self.current = np.minimum(self.current, self.samples[position])


def sample(mean: Floats, covariance: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Samples of a multivariate normal distribution; half of them mirror the others.

    Args:
        mean: float64 [n].
        covariance: float64 [n, n].
        count: How many, an even number.
        rng: Where they come from.

    Returns:
        float64 [n, count].
    """
    size = len(mean)
    values, vectors = np.linalg.eigh(covariance)
    noise = rng.standard_normal((size, count // 2))
    noise = np.concatenate([noise, -noise], axis=1)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    return np.asarray(mean[:, None] + root @ noise)


def pick(shortlists: Iterable[Shortlist], compiled: set[int], allowance: int, discount: float) -> list[tuple[int, int]]:
    """Picks each cell's quota, one config per cell and round, cells that gain most first.

    A config that is compiled anyway (for another cell, or already) is preferred: one that is not
    counts ``discount`` of its gain.

    Args:
        shortlists: One per cell.
        compiled: Configs that have been compiled.
        allowance: New configs that may be compiled; beyond it only compiled ones are picked, and
            none where a cell's shortlist has none left.
        discount: Between 0 and 1.

    Returns:
        (cell, config) in the order picked.
    """
    out = []
    have = set(compiled)
    lists = list(shortlists)
    for turn in range(max((s.quota for s in lists), default=0)):
        turns = [(s, s.gains()) for s in lists if turn < s.quota and len(s.chosen) < len(s.configs)]
        turns.sort(key=lambda item: (-float(item[1].max()), item[0].cell))
        for shortlist, gains in turns:
            there = np.fromiter((int(c) in have for c in shortlist.configs), bool, len(shortlist.configs))
            open_ = gains >= 0
            score = np.where(there, gains, gains * discount)
            allowed = open_ & there if len(have) - len(compiled) >= allowance else open_
            if not allowed.any():
                continue
            position = int(np.argmax(np.where(allowed, score, -np.inf)))
            shortlist.choose(position)
            config = int(shortlist.configs[position])
            have.add(config)
            out.append((shortlist.cell, config))
    return out
