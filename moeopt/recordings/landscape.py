"""Recordings of other shapes, in the form that a search learns from.

The shipped recordings are read from a summary beside them, because parsing them takes seconds::

    python -m moeopt.recordings.landscape
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moeopt.core.config import LaunchConfig, config_table, configs_of
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.trial import Cell
from moeopt.recordings.shipped import shipped_directory

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moeopt.recordings.format import Recording

log = logging.getLogger(__name__)

SUMMARY: Final = "summary.npz"


@dataclass(frozen=True, eq=False)
class Landscape:
    """The medians of a recording.

    Attributes:
        shape: The layer it was measured for.
        gpu: The GPU it was measured on.
        table: All configs that fit the GPU's limits, ascending, as
            :func:`moeopt.core.config.config_table` writes them.
        cells: (role, batch size) of each row of ``us``.
        us: Median microseconds, float32 [cells, configs]; NaN where the config did not compile.
    """

    shape: MoEShape
    gpu: GpuSpec
    table: NDArray[np.int64]
    cells: tuple[Cell, ...]
    us: NDArray[np.float32]

    @classmethod
    def from_recording(cls, recording: Recording) -> Landscape:
        """Takes the medians over the replays."""
        configs = tuple(sorted(c for c, row in recording.rows.items() if row.status != "out_of_resources"))
        sizes = sorted({m for row in recording.rows.values() for part in row.roles.values() for m in part.us})
        cells = tuple(Cell(role, m) for role in ROLES for m in sizes)
        us = np.full((len(cells), len(configs)), np.nan, dtype=np.float32)
        for j, config in enumerate(configs):
            row = recording.rows[config]
            if row.status == "ok":
                for i, cell in enumerate(cells):
                    role = row.roles.get(cell.roles[0])
                    if role is not None and role.us.get(cell.batch_size):
                        us[i, j] = np.median(role.us[cell.batch_size])
        timed = [i for i in range(len(cells)) if not np.isnan(us[i]).all()]
        return cls(recording.shape, recording.gpu, config_table(configs), tuple(cells[i] for i in timed), us[timed])

    @property
    def configs(self) -> tuple[LaunchConfig, ...]:
        """The configs of the columns of ``us``."""
        return configs_of(self.table)

    def joint(self) -> Landscape:
        """The same for joint mode: one cell per batch size, its time the sum of both roles'."""
        row = {cell: i for i, cell in enumerate(self.cells)}
        sizes = sorted({c.batch_size for c in self.cells if all(Cell(r, c.batch_size) in row for r in ROLES)})
        us = [self.us[row[Cell("up", m)]] + self.us[row[Cell("down", m)]] for m in sizes]
        return Landscape(self.shape, self.gpu, self.table, tuple(Cell("joint", m) for m in sizes),
                         np.array(us, dtype=np.float32).reshape(len(sizes), len(self.table)))  # fmt: skip


def load_landscapes(
    directory: Path | None = None, *, exclude_shape: MoEShape | None = None, exclude_gpu: str | None = None
) -> tuple[Landscape, ...]:
    """The recordings of a directory, by file name; not those in folders of it, as ``held-out`` is.

    Of one that is only in the summary, the summary counts: an installed moeopt has few of the files.

    Args:
        directory: By default the recordings that moeopt ships.
        exclude_shape: Leave out every recording of this shape: a replay must not look itself up.
        exclude_gpu: With ``exclude_shape``: only those of this GPU's name are left out.
    """
    if directory is None:
        directory = shipped_directory()
    summary = _read_summary(directory)
    out = []
    for name in sorted({*summary, *(path.name for path in directory.glob("*.jsonl.gz"))}):
        path = directory / name
        size, landscape = summary.get(name, (0, None))
        if landscape is None or (path.exists() and path.stat().st_size != size):
            landscape = _parse(path)
        same = landscape.shape == exclude_shape and exclude_gpu in (None, landscape.gpu.name)
        if not same:
            out.append(landscape)
    return tuple(out)


def _parse(path: Path) -> Landscape:
    from moeopt.recordings.format import Recording

    log.info("%s is not in the summary of recordings: reading the whole file", path.name)
    return Landscape.from_recording(Recording.load(path))


def write_summary(directory: Path) -> Path:
    """Writes what :func:`load_landscapes` needs of all recordings of a directory into one file."""
    arrays: dict[str, NDArray[Any]] = {}
    heads = []
    for number, path in enumerate(sorted(directory.glob("*.jsonl.gz"))):
        landscape = _parse(path)
        best = np.nanmin(landscape.us, axis=1)
        heads.append(
            {
                "file": path.name,
                "bytes": path.stat().st_size,
                "shape": landscape.shape.to_dict(),
                "gpu": landscape.gpu.to_dict(),
                "cells": [[c.role, c.batch_size] for c in landscape.cells],
            }
        )
        arrays[f"configs{number}"] = landscape.table.astype(np.uint16)
        arrays[f"best{number}"] = best.astype(np.float32)
        # The log of the ratio to the best, in half precision: exact to 0.01 % near the best.
        arrays[f"excess{number}"] = np.log(landscape.us / best[:, None]).astype(np.float16)
    path = directory / SUMMARY
    np.savez_compressed(path, heads=np.array(json.dumps(heads, sort_keys=True)), **arrays)  # type: ignore[arg-type]
    return path


def _read_summary(directory: Path) -> dict[str, tuple[int, Landscape]]:
    """Bytes of the file and landscape of each recording, by file name."""
    path = directory / SUMMARY
    if not path.exists():
        return {}
    out = {}
    with np.load(path) as arrays:
        for number, head in enumerate(json.loads(str(arrays["heads"]))):
            excess = arrays[f"excess{number}"].astype(np.float32)
            landscape = Landscape(
                shape=MoEShape.from_dict(head["shape"]),
                gpu=GpuSpec.from_dict(head["gpu"]),
                table=arrays[f"configs{number}"].astype(np.int64),
                cells=tuple(Cell(role, m) for role, m in head["cells"]),
                us=np.exp(excess) * arrays[f"best{number}"][:, None],
            )
            out[head["file"]] = int(head["bytes"]), landscape
    return out


def main(arguments: Iterable[str]) -> None:
    """Writes the summary of a directory, by default of the shipped recordings."""
    given = list(arguments)
    directory = Path(given[0]) if given else shipped_directory()
    path = write_summary(directory)
    log.info("wrote %s, %d bytes", path, path.stat().st_size)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(sys.argv[1:])
