"""Rooflines: times that no kernel can beat, by the bytes and operations of a launch and the rates of a GPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Cell
from moeopt.kernels.routing import Routing
from moeopt.kernels.work import Visits, Work, counted_visits, launch_work
from moeopt.kernels.workset import LAUNCHES
from moeopt.measure.rates import Rates

# Large batches differ little from one another, and take long to draw: from here on one is drawn.
_LARGE_BATCH: Final = 512


def drawn_work(shape: MoEShape, role: Role, batch_size: int, routing: str, seed: int) -> Work:
    """The work of the routings that are timed, on average."""
    return launch_work(shape, role, batch_size, _visits(shape, batch_size, routing, seed))


@lru_cache(maxsize=256)
def _visits(shape: MoEShape, batch_size: int, routing: str, seed: int) -> Visits:
    count = LAUNCHES if batch_size < _LARGE_BATCH else 1
    return counted_visits(Routing.parse(routing).draw(shape, batch_size, count, seed), shape.num_experts)


def launch_bytes(shape: MoEShape, cell: Cell, routing: str, seed: int = 0) -> float | None:
    """Bytes that the cell's launches move at least, the sum of both roles' in joint mode.

    Args:
        shape: The layer.
        cell: Role and batch size.
        routing: A routing, or the key of one.
        seed: Of the routings.

    Returns:
        None where the routing is the key of a file: it does not say which.
    """
    if routing.startswith("file:") and not Path(routing.removeprefix("file:")).expanduser().exists():
        return None
    return sum(drawn_work(shape, role, cell.batch_size, routing, seed).bytes for role in cell.roles)


def bound_us(what: Work, rates: Rates) -> float:
    """Microseconds that the work takes at these rates: the longer of the two."""
    moving = what.bytes / (rates.memory_gbps * 1e3)
    computing = what.flops / (rates.matmul_tflops * 1e6) if rates.matmul_tflops else 0.0
    return max(moving, computing)


def roofline_us(shape: MoEShape, cell: Cell, rates: Rates, routing: str, seed: int) -> float:
    """Microseconds of the cell's launches at these rates; the sum of both roles in joint mode."""
    return sum(bound_us(drawn_work(shape, role, cell.batch_size, routing, seed), rates) for role in cell.roles)
