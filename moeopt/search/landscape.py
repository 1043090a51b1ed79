"""Recordings of other shapes as a prior: what a search may learn from before it times anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moeopt.gpu import GpuSpec
from moeopt.measure.base import Cell
from moeopt.shape import ROLES, MoEShape
from moeopt.space import LaunchConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moeopt.measure.recording import Recording


@dataclass(frozen=True, eq=False)
class Landscape:
    """The medians of a recording.

    Attributes:
        shape: The layer it was measured for.
        gpu: The GPU it was measured on.
        configs: All configs that fit the GPU's limits.
        cells: (role, batch size) of each row of ``us``.
        us: Median microseconds, float32 [cells, configs]; NaN where the config did not compile.
    """

    shape: MoEShape
    gpu: GpuSpec
    configs: tuple[LaunchConfig, ...]
    cells: tuple[Cell, ...]
    us: NDArray[np.float32]

    @classmethod
    def from_recording(cls, recording: Recording) -> Landscape:
        """Takes the medians over the replays."""
        configs = tuple(sorted(c for c, row in recording.rows.items() if row.status != "out_of_resources"))
        cells = tuple(Cell(role, m) for role in ROLES for m in recording.batch_sizes)
        us = np.full((len(cells), len(configs)), np.nan, dtype=np.float32)
        for j, config in enumerate(configs):
            row = recording.rows[config]
            if row.status == "ok":
                for i, cell in enumerate(cells):
                    role = row.roles.get(cell.roles[0])
                    if role is not None and role.us.get(cell.batch_size):
                        us[i, j] = np.median(role.us[cell.batch_size])
        return cls(recording.shape, recording.gpu, configs, cells, us)
