"""More batch sizes where the nearest key's config is slow between two keys.

An engine takes the config of the nearest batch size in the file. Half way between two keys that can
be the wrong one of the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from moeopt.shape import Role
from moeopt.space import LaunchConfig

# Microseconds of one launch of (role, batch size, config): measured or estimated; None where not known.
TimeUs = Callable[[Role, int, LaunchConfig], float | None]

TOLERANCE: Final = 0.02
_MOST_RUNGS: Final = 16


@dataclass(frozen=True)
class Rung:
    """A batch size to add to a file.

    Attributes:
        batch_size: The new key.
        up: Config of the up projection.
        down: Config of the down projection (up's in joint mode).
        us: Both launches at this batch size.
        nearest_us: What the engine would run without the key.
        copied_from: The tuned batch size whose configs these are.
    """

    batch_size: int
    up: LaunchConfig
    down: LaunchConfig
    us: float
    nearest_us: float
    copied_from: int

    @property
    def gain(self) -> float:
        """How much slower the engine would be without the key: 0.05 is 5 %."""
        return self.nearest_us / self.us - 1


def find_rungs(
    up: Mapping[int, LaunchConfig],
    down: Mapping[int, LaunchConfig] | None,
    time_us: TimeUs,
    *,
    tolerance: float = TOLERANCE,
    most: int = _MOST_RUNGS,
) -> list[Rung]:
    """Batch sizes to add so that no midpoint runs a config that its neighbour beats by more than the tolerance.

    Between two keys the engine changes over half way. Both sides of the change are looked at; where the
    other key's configs are faster there, the batch size becomes a key with them, and the remaining
    interval is looked at again.

    Args:
        up: Tuned batch size -> config of the up projection (of both in joint mode).
        down: The same for down, None in joint mode.
        time_us: What a launch takes.
        tolerance: How much slower is too slow.
        most: At most this many keys, those with the largest gain.

    Returns:
        The new keys, ascending.
    """
    pairs = {m: (up[m], down[m] if down is not None else up[m]) for m in sorted(up)}
    keys = list(pairs)
    rungs: list[Rung] = []
    for low, high in itertools.pairwise(keys):
        rungs += _between(low, high, low, high, pairs, time_us, tolerance)
    rungs.sort(key=lambda rung: -rung.gain)
    return sorted(rungs[:most], key=lambda rung: rung.batch_size)


def _between(
    low: int,
    high: int,
    low_source: int,
    high_source: int,
    pairs: Mapping[int, tuple[LaunchConfig, LaunchConfig]],
    time_us: TimeUs,
    tolerance: float,
) -> list[Rung]:
    """New keys strictly between two keys whose configs come from two tuned batch sizes."""
    rungs: list[Rung] = []
    while high - low > 1:
        # A tie goes to the first key of the file, the smaller one.
        below = (low + high) // 2
        for m, nearest, other in ((below, low_source, high_source), (below + 1, high_source, low_source)):
            if not low < m < high:
                continue
            now, instead = _total(pairs[nearest], m, time_us), _total(pairs[other], m, time_us)
            if now is not None and instead is not None and now > instead * (1 + tolerance):
                rungs.append(Rung(m, *pairs[other], us=instead, nearest_us=now, copied_from=other))
                if other == high_source:
                    high = m
                else:
                    low = m
                break
        else:
            break
    return rungs


def _total(pair: tuple[LaunchConfig, LaunchConfig], m: int, time_us: TimeUs) -> float | None:
    up, down = time_us("up", m, pair[0]), time_us("down", m, pair[1])
    return up + down if up is not None and down is not None else None


def with_rungs(
    up: Mapping[int, LaunchConfig], down: Mapping[int, LaunchConfig] | None, rungs: list[Rung]
) -> tuple[dict[int, LaunchConfig], dict[int, LaunchConfig] | None]:
    """The configs to export, the new batch sizes among them."""
    more_up = {**up, **{r.batch_size: r.up for r in rungs}}
    more_down = {**down, **{r.batch_size: r.down for r in rungs}} if down is not None else None
    return dict(sorted(more_up.items())), dict(sorted(more_down.items())) if more_down is not None else None


class InterpolatedTimes:
    """Estimates from a study database: between the two tuned batch sizes at which a config was timed.

    The time is a straight line in log(batch size) and log(time). A config that was not timed on both
    sides has no estimate.
    """

    def __init__(self, times: Mapping[tuple[Role, LaunchConfig], Mapping[int, float]]) -> None:
        """
        Args:
            times: Per (role, config), batch size -> microseconds.
        """
        self._times = {key: sorted(by_m.items()) for key, by_m in times.items()}

    def __call__(self, role: Role, batch_size: int, config: LaunchConfig) -> float | None:
        points = self._times.get((role, config), [])
        for m, us in points:
            if m == batch_size:
                return us
        for (m0, us0), (m1, us1) in itertools.pairwise(points):
            if m0 < batch_size < m1:
                share = math.log(batch_size / m0) / math.log(m1 / m0)
                return us0 * float((us1 / us0) ** share)
        return None
