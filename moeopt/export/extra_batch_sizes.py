"""More batch sizes where the nearest key's config is slow between two keys.

An engine takes the config of the nearest batch size in the file. Half way between two keys that can
be the wrong one of the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES, Role
from moeopt.core.table import ConfigPair, ConfigTable

# Microseconds of one launch of (role, batch size, config): measured or estimated; None where not known.
TimeUs = Callable[[Role, int, LaunchConfig], float | None]

TOLERANCE: Final = 0.02
_MOST: Final = 16


@dataclass(frozen=True)
class ExtraBatchSize:
    """A batch size to add to a file.

    Attributes:
        batch_size: The new key.
        pair: Its configs.
        copied_from: The tuned batch size whose configs these are.
        worst_at: Of the batch sizes that were looked at, the one that gains most from the key.
        us: Both launches there.
        nearest_us: What the engine runs there without the key.
    """

    batch_size: int
    pair: ConfigPair
    copied_from: int
    worst_at: int
    us: float
    nearest_us: float

    @property
    def gain(self) -> float:
        """How much slower the engine is at ``worst_at`` without the key: 0.05 is 5 %."""
        return self.nearest_us / self.us - 1


@dataclass(frozen=True)
class ExtraBatchSizes:
    """What :func:`find_extra_batch_sizes` found.

    Attributes:
        found: The batch sizes to add, ascending.
        unknown: Midpoints at which a time was missing, so that nothing can be said there.
    """

    found: tuple[ExtraBatchSize, ...] = ()
    unknown: tuple[int, ...] = ()

    def added_to(self, table: ConfigTable) -> ConfigTable:
        """The configs to export, the new batch sizes among them."""
        return table.with_pairs({extra.batch_size: extra.pair for extra in self.found})


def find_extra_batch_sizes(
    table: ConfigTable, time_us: TimeUs, *, tolerance: float = TOLERANCE, most: int = _MOST
) -> ExtraBatchSizes:
    """Batch sizes to add so that no midpoint runs a config that its neighbour beats by more than the tolerance.

    Between two keys the engine changes over half way. Both sides of the change are looked at; where the
    other key's configs are faster there, the batch size becomes a key with them, and the remaining
    interval is looked at again.

    Args:
        table: The tuned configs.
        time_us: What a launch takes.
        tolerance: How much slower is too slow.
        most: At most this many keys, those with the largest gain.
    """
    found: list[ExtraBatchSize] = []
    unknown: list[int] = []
    for low, high in itertools.pairwise(sorted(table)):
        found += _between(low, high, table, time_us, tolerance, unknown)
    found.sort(key=lambda extra: -extra.gain)
    return ExtraBatchSizes(tuple(sorted(found[:most], key=lambda extra: extra.batch_size)), tuple(unknown))


def _between(
    low_key: int,
    high_key: int,
    table: ConfigTable,
    time_us: TimeUs,
    tolerance: float,
    unknown: list[int],
) -> list[ExtraBatchSize]:
    """New keys strictly between two neighbours; midpoints without a time are added to ``unknown``."""
    # One key on each side is enough: between it and the key that it was copied from, the config is the same.
    found: dict[int, ExtraBatchSize] = {}
    low, high = low_key, high_key
    while high - low > 1:
        # A tie goes to the first key of the file, the smaller one.
        below = (low + high) // 2
        for m, nearest, other in ((below, low_key, high_key), (below + 1, high_key, low_key)):
            if not low < m < high:
                continue
            now, instead = _total(table[nearest], m, time_us), _total(table[other], m, time_us)
            if now is None or instead is None:
                unknown.append(m)
            elif now > instead * (1 + tolerance):
                extra = ExtraBatchSize(m, table[other], copied_from=other, worst_at=m, us=instead, nearest_us=now)
                if other in found and found[other].gain > extra.gain:
                    extra = replace(found[other], batch_size=m)
                found[other] = extra
                if other == high_key:
                    high = m
                else:
                    low = m
                break
        else:
            break
    return list(found.values())


def _total(pair: ConfigPair, m: int, time_us: TimeUs) -> float | None:
    up, down = (time_us(role, m, pair.config(role)) for role in ROLES)
    return up + down if up is not None and down is not None else None


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
