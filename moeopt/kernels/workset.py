"""Launches that a CUDA graph holds, over experts so chosen that weights come from memory.

Serving touches a layer's weights once per forward pass; between two passes the other layers go
through the L2 cache. A graph that replays launches over the same few experts would find them in L2,
which is why published tuners see a cache at small batch sizes that serving never has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeopt.core.shape import MoEShape, Role
from moeopt.kernels.work import counted_visits, expert_bytes

# Launches per graph over as many routings, where nothing asks for more.
LAUNCHES: Final = 6
MAX_LAUNCHES: Final = 32
# Distinct weight bytes of one graph, over the size of L2: what is used again has been pushed out.
COLD_FACTOR: Final = 2.0
MAX_COPIES: Final = 16


@dataclass(frozen=True, slots=True)
class WorkSet:
    """The launches of one graph.

    Attributes:
        topk_ids: [launches, M, top_k] int32.
        copies: How many copies of the weights the launches take turns with.
        bytes_per_launch: Weight bytes that one launch touches, on average.
        distinct_bytes: Distinct weight bytes that one graph touches.
        cold: Whether that is at least :data:`COLD_FACTOR` times L2.
    """

    topk_ids: NDArray[np.int32]
    copies: int
    bytes_per_launch: float
    distinct_bytes: float
    cold: bool


def launches_wanted(shape: MoEShape, role: Role, per_launch: float, l2_bytes: int) -> int:
    """Launches per graph so that, over different weights, they touch enough to leave L2."""
    if per_launch <= 0:
        return LAUNCHES
    return max(LAUNCHES, min(MAX_LAUNCHES, math.ceil(COLD_FACTOR * l2_bytes / per_launch)))


def copies_wanted(shape: MoEShape, role: Role, per_launch: float, launches: int, l2_bytes: int) -> int:
    """Copies of the weights that are needed where the whole layer fits in L2 or nearly so."""
    everything = expert_bytes(shape, role) * shape.num_experts
    if per_launch <= 0:
        return 1
    return max(1, min(math.ceil(COLD_FACTOR * l2_bytes / everything), launches, MAX_COPIES))


def make_workset(
    draw: Callable[[int], NDArray[np.int32]],
    shape: MoEShape,
    role: Role,
    l2_bytes: int,
    *,
    copies_allowed: int = MAX_COPIES,
) -> WorkSet:
    """Lays drawn routings out over one graph.

    Where one launch alone does not exceed L2, each launch's experts are renamed so that it visits
    those that were not visited for longest. Renaming changes neither how many experts a batch visits
    nor how many tokens each gets, so the work is that of the routing that was drawn; it only makes
    successive launches meet other weights, as successive layers do.

    Args:
        draw: Gives so many routings, [count, M, top_k] int32.
        shape: The layer.
        role: Which projection.
        l2_bytes: Size of the L2 cache; 0 asks for a warm one: every launch repeats the first routing.
        copies_allowed: Most copies of the weights that fit in memory.
    """
    size = expert_bytes(shape, role)
    drawn = draw(LAUNCHES)
    if l2_bytes <= 0:
        bytes_touched = counted_visits(drawn[:1], shape.num_experts).experts * size
        return WorkSet(np.repeat(drawn[:1], LAUNCHES, axis=0), 1, bytes_touched, bytes_touched, cold=False)
    per_launch = counted_visits(drawn, shape.num_experts).experts * size
    goal = COLD_FACTOR * l2_bytes
    if per_launch >= goal:
        return WorkSet(drawn, 1, per_launch, per_launch, cold=True)
    launches = launches_wanted(shape, role, per_launch, l2_bytes)
    copies = min(copies_allowed, copies_wanted(shape, role, per_launch, launches, l2_bytes))
    ids = draw(launches).copy()
    last_use = np.zeros((copies, shape.num_experts), dtype=np.int64)
    for number in range(launches):
        _rename(ids[number], last_use[number % copies], number + 1)
    distinct = float((last_use > 0).sum()) * size
    return WorkSet(ids, copies, per_launch, distinct, cold=distinct >= goal)


def _rename(ids: NDArray[np.int32], last_use: NDArray[np.int64], now: int) -> None:
    """Renames the experts of one launch, in place, to those used longest ago."""
    experts = last_use.shape[0]
    local = (ids >= 0) & (ids < experts)
    visited = np.unique(ids[local])
    names = np.sort(np.argsort(last_use, kind="stable")[: len(visited)])
    lookup = np.arange(experts, dtype=ids.dtype)
    lookup[visited] = names
    ids[local] = lookup[ids[local]]
    last_use[names] = now
