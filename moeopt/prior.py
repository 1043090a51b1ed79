"""What is known before anything is timed: recordings of other shapes, and configs that were good elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from moeopt.measure.base import Cell, Device
from moeopt.search.landscape import Landscape
from moeopt.space import LaunchConfig
from moeopt.study import StudyStore


def find_landscapes(device: Device) -> tuple[Landscape, ...]:
    """The shipped recordings, but for those of the shape that is tuned: a replay must not look itself up."""
    return ()


def find_portfolio(
    device: Device, cells: Sequence[Cell], candidates: Sequence[LaunchConfig], store: StudyStore
) -> tuple[LaunchConfig, ...]:
    """Configs to try first, best first."""
    return ()
