"""Standing of a search: the pool that is ranked, and what is known of it in one generation."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.core.config import LaunchConfig, config_table
from moeopt.core.trial import Cell, Job
from moeopt.search.features import cell_features, config_features, squash
from moeopt.search.ledger import Ledger
from moeopt.search.prior import make_prior
from moeopt.search.strategy import SearchProblem
from moeopt.search.surrogate import Surrogate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

# A config that failed enters the surrogate as slower than the best by this (in the log of time): just enough that its
# neighbours lose their exploration bonus.
FAILED_EXCESS: Final = 0.1
# What a cell's best is expected to gain still, in the log of time: a BLOCK_SIZE_M is not given up for less.
_HOPE: Final = 0.02
# While up and down have no BLOCK_SIZE_M in common, any sum up to this over the expected best is an improvement.
_FIRST_SUM: Final = 1.1
_FLOOR: Final = -20.0  # log of a time that nothing reaches
_LEAST_PER_CELL: Final = 64  # configs that a large space keeps for each cell


@dataclass(frozen=True, eq=False)
class Pool:
    """The configs that are ranked, by number.

    Attributes:
        cells: What gets a config each.
        partner: For each cell the other role's at the same batch size, or None.
        configs: The candidates that are ranked.
        index: The inverse of ``configs``.
        blocks: The values of BLOCK_SIZE_M, ascending.
        block: Which of them each config has, int64 [configs].
        mean: Expected log time, up to a level per cell, float64 [cells, configs].
        model: The surrogate.
    """

    cells: tuple[Cell, ...]
    partner: tuple[int | None, ...]
    configs: tuple[LaunchConfig, ...]
    index: dict[LaunchConfig, int]
    blocks: Ints
    block: Ints
    mean: Floats
    model: Surrogate

    @classmethod
    def of(cls, problem: SearchProblem, ledger: Ledger, most: int, portfolio_bonus: float) -> Pool:
        """The pool of a problem: all candidates, or of a large space the best of each cell by prior mean.

        Args:
            problem: What to search.
            ledger: What was measured earlier stays in the pool.
            most: Configs that may be ranked.
            portfolio_bonus: How much faster (in the log) a config of the portfolio is expected to be.
        """
        cells = problem.cells
        table = config_table(problem.candidates)
        prior = make_prior(problem.shape, problem.gpu, cells, table, problem.landscapes)
        listed = set(problem.portfolio)
        first = np.array([c in listed for c in problem.candidates])
        keep = np.arange(len(table))
        if len(table) > most:
            each = max(_LEAST_PER_CELL, most // len(cells))
            best = np.argpartition(prior.mean, each, axis=1)[:, :each]
            known = {c for cell in cells for c in ledger.rows(cell)}
            there = np.flatnonzero(first | np.array([c in known for c in problem.candidates]))
            keep = np.unique(np.concatenate([best.ravel(), there]))
        configs = tuple(problem.candidates[i] for i in keep)
        blocks, block = np.unique(table[keep, 0], return_inverse=True)
        place = {(cell.batch_size, str(cell.role)): i for i, cell in enumerate(cells)}
        other = {"up": "down", "down": "up", "joint": ""}
        mean = prior.mean[:, keep]
        return cls(
            cells=cells,
            partner=tuple(place.get((c.batch_size, other[c.role])) for c in cells),
            configs=configs,
            index={c: i for i, c in enumerate(configs)},
            blocks=blocks,
            block=block,
            mean=mean - portfolio_bonus * first[keep],
            model=Surrogate(config_features(table[keep]), cell_features(cells), mean, prior.basis(keep)),
        )


class Standing:
    """What is known in one generation. Times are logs, relative to the cell's best so far.

    Attributes:
        best: µs of each cell's best so far, float64 [cells]; NaN where nothing was timed.
        begun: Whether a cell has one, bool [cells].
        empty: Whether no cell has.
        closed: What may not be asked for again, bool [cells, configs].
        mean: Expected log time over the cell's best, float64 [cells, configs].
        timed_us: µs of the best timed with each BLOCK_SIZE_M, float64 [cells, blocks].
        expected_us: µs of the best that is to be expected with it, float64 [cells, blocks].
        share: A role's share of its batch size's sum, float64 [cells].
    """

    def __init__(self, pool: Pool, ledger: Ledger, asked: Collection[Job]) -> None:
        self._pool = pool
        cells, index = pool.cells, pool.index
        timed = [ledger.timed(cell) for cell in cells]
        self.best = np.array([min(t.values(), default=math.nan) for t in timed])
        self.begun = np.isfinite(self.best)
        self.empty = not self.begun.any()
        self.closed = np.zeros((len(cells), len(pool.configs)), dtype=bool)
        self.closed[:, [index[c] for c in ledger.failed() if c in index]] = True
        place = {cell: i for i, cell in enumerate(cells)}
        for job in asked:
            self.closed[place[job.cell], index[job.config]] = True
        failed: list[tuple[int, int]] = []
        for i, cell in enumerate(cells):
            rows = {index[c]: m for c, m in sorted(ledger.rows(cell).items()) if c in index}
            self.closed[i, list(rows)] = True
            if self.begun[i]:
                failed += [(c, i) for c, m in rows.items() if m.status in ("failed", "rejected")]
        self._times = [(index[c], i, us) for i, times in enumerate(timed) for c, us in times.items() if c in index]
        self._failed = np.array(failed, dtype=np.int64).reshape(-1, 2)
        self.mean = pool.mean - pool.mean.min(axis=1, keepdims=True) if self.empty else self._posterior()
        self.share = np.ones(len(cells))
        self._best_per_block()

    def _posterior(self) -> Floats:
        """Expected log time over the cell's best, given all times; a cell's level is taken out before."""
        pool = self._pool
        config = np.array([r[0] for r in self._times], dtype=np.int64)
        cell = np.array([r[1] for r in self._times], dtype=np.int64)
        excess = np.log(np.array([r[2] for r in self._times]) / self.best[cell])
        config, cell = np.append(config, self._failed[:, 0]), np.append(cell, self._failed[:, 1])
        excess = np.append(excess, np.full(len(self._failed), FAILED_EXCESS))
        value = squash(excess) - pool.mean[cell, config]
        counts = np.bincount(cell, minlength=len(pool.cells))
        level = np.bincount(cell, value, len(pool.cells)) / np.maximum(counts, 1)
        level[counts == 0] = level[counts > 0].mean()
        return pool.model.condition(config, cell, value - level[cell]) + level[:, None] + pool.mean

    def covariances(self, lists: list[Ints]) -> list[Floats]:
        """Covariance of some configs of each cell, float64 [n, n] each."""
        model = self._pool.model
        if self.empty:
            return [model.prior_covariance(configs, cell) for cell, configs in enumerate(lists)]
        return model.covariances(lists)

    def _best_per_block(self) -> None:
        pool = self._pool
        scale = np.where(self.begun, self.best, 1.0)
        shape = (len(pool.cells), len(pool.blocks))
        self.timed_us, self.expected_us = np.full(shape, np.inf), np.full(shape, np.inf)
        for config, cell, us in self._times:
            block = pool.block[config]
            self.timed_us[cell, block] = min(self.timed_us[cell, block], us)
        for block in range(shape[1]):
            there = pool.block == block
            lowest = np.where(self.closed[:, there], np.inf, self.mean[:, there]).min(axis=1)
            self.expected_us[:, block] = np.minimum(self.timed_us[:, block], scale * np.exp(lowest - _HOPE))

    def targets(self) -> Floats:
        """Log of the time, over the cell's best, under which the batch size's sum gets better: [cells, blocks].

        With a BLOCK_SIZE_M b, up improves the sum if it is faster than the best sum less what down is expected
        to reach with b, and the other way round. Sets :attr:`share`, too.
        """
        out = np.zeros(self.timed_us.shape)
        if self.empty:
            return out
        for cell, partner in enumerate(self._pool.partner):
            if partner is None or not (self.begun[cell] and self.begun[partner]):
                continue
            total = (self.timed_us[cell] + self.timed_us[partner]).min()
            if not np.isfinite(total):
                total = _FIRST_SUM * (self.expected_us[cell] + self.expected_us[partner]).min()
            scale = self.best[cell]
            with np.errstate(invalid="ignore", divide="ignore"):
                out[cell] = np.log(np.maximum(total - self.expected_us[partner], 0.0) / scale)
            self.share[cell] = scale / total
        return np.maximum(out, _FLOOR)
