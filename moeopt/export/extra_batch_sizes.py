"""More batch sizes where the nearest key's config is slow between two keys.

An engine takes the config of the nearest batch size in the file. Half way between two keys that can
be the wrong one of the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role

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
        copied_from: The tuned batch size whose configs these are.
        worst_at: Of the batch sizes that were looked at, the one that gains most from the key.
        us: Both launches there.
        nearest_us: What the engine runs there without the key.
    """

    batch_size: int
    up: LaunchConfig
    down: LaunchConfig
    copied_from: int
    worst_at: int
    us: float
    nearest_us: float

    @property
    def gain(self) -> float:
        """How much slower the engine is at ``worst_at`` without the key: 0.05 is 5 %."""
        return self.nearest_us / self.us - 1


@dataclass(frozen=True)
class Ladder:
    """What :func:`find_rungs` found.

    Attributes:
        rungs: The batch sizes to add, ascending.
        unknown: Midpoints at which a time was missing, so that nothing can be said there.
    """

    rungs: tuple[Rung, ...]
    unknown: tuple[int, ...]


def find_rungs(
    up: Mapping[int, LaunchConfig],
    down: Mapping[int, LaunchConfig] | None,
    time_us: TimeUs,
    *,
    tolerance: float = TOLERANCE,
    most: int = _MOST_RUNGS,
) -> Ladder:
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
    """
    pairs = {m: (up[m], down[m] if down is not None else up[m]) for m in sorted(up)}
    keys = list(pairs)
    rungs: list[Rung] = []
    unknown: list[int] = []
    for low, high in itertools.pairwise(keys):
        rungs += _between(low, high, pairs, time_us, tolerance, unknown)
    rungs.sort(key=lambda rung: -rung.gain)
    return Ladder(tuple(sorted(rungs[:most], key=lambda rung: rung.batch_size)), tuple(unknown))


def _between(
    low_key: int,
    high_key: int,
    pairs: Mapping[int, tuple[LaunchConfig, LaunchConfig]],
    time_us: TimeUs,
    tolerance: float,
    unknown: list[int],
) -> list[Rung]:
    """New keys strictly between two neighbours; midpoints without a time are added to ``unknown``."""
    # One key on each side is enough: between it and the key that it was copied from, the config is the same.
    rungs: dict[int, Rung] = {}
    low, high = low_key, high_key
    while high - low > 1:
        # A tie goes to the first key of the file, the smaller one.
        below = (low + high) // 2
        for m, nearest, other in ((below, low_key, high_key), (below + 1, high_key, low_key)):
            if not low < m < high:
                continue
            now, instead = _total(pairs[nearest], m, time_us), _total(pairs[other], m, time_us)
            if now is None or instead is None:
                unknown.append(m)
            elif now > instead * (1 + tolerance):
                rung = Rung(m, *pairs[other], copied_from=other, worst_at=m, us=instead, nearest_us=now)
                if other in rungs and rungs[other].gain > rung.gain:
                    rung = replace(rungs[other], batch_size=m)
                rungs[other] = rung
                if other == high_key:
                    high = m
                else:
                    low = m
                break
        else:
            break
    return list(rungs.values())


def _total(pair: tuple[LaunchConfig, LaunchConfig], m: int, time_us: TimeUs) -> float | None:
    up, down = time_us("up", m, pair[0]), time_us("down", m, pair[1])
    return up + down if up is not None and down is not None else None


def with_rungs(
    up: Mapping[int, LaunchConfig], down: Mapping[int, LaunchConfig] | None, rungs: Sequence[Rung]
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
