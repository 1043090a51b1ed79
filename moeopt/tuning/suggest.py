"""Config files from the cost model alone: for who has no GPU to measure on, and marked as such."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moeopt import engines
from moeopt.core.config import LaunchConfig, config_table
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import illegal_reason
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.space import SearchSpace
from moeopt.core.table import ConfigPair, ConfigTable
from moeopt.costmodel.formula import launch_parts
from moeopt.costmodel.model import predict_us
from moeopt.errors import ExportError, InvalidInputError
from moeopt.export import export_configs
from moeopt.export.write import MARKER
from moeopt.files import write_file


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What the cost model thinks best for one batch size; nothing of it was measured.

    Attributes:
        batch_size: Tokens.
        up: Config of the up projection.
        down: Config of the down projection; in joint mode the same.
        predicted_us: Both projections.
        predicted_default_us: Both with the engine's default config.
    """

    batch_size: int
    up: LaunchConfig
    down: LaunchConfig
    predicted_us: float
    predicted_default_us: float

    @property
    def pair(self) -> ConfigPair:
        """Both projections' configs."""
        return ConfigPair(self.up, self.down)


def suggest(
    shape: MoEShape,
    gpu: GpuSpec,
    batch_sizes: Sequence[int],
    *,
    space: str = "grid",
    mode: Literal["split", "joint"] = "split",
    engine: str = engines.DEFAULT,
) -> dict[int, Suggestion]:
    """The configs that the cost model ranks first, for each batch size.

    In split mode both projections have the same BLOCK_SIZE_M, as one alignment serves both. Configs
    that are expected to keep registers in local memory are left out.

    Args:
        shape: The layer.
        gpu: By its data sheet.
        batch_sizes: M.
        space: ``grid`` or ``wide``.
        mode: ``split`` for a config each, ``joint`` for one for both.
        engine: Whose default config the prediction is compared with.

    Raises:
        InvalidInputError: The space is unknown, or none of its configs fits the GPU.
    """
    configs = [
        config
        for config in SearchSpace.named(space, shape).configs()
        if all(illegal_reason(config, shape, role, gpu) is None for role in ROLES)
    ]
    if not configs:
        raise InvalidInputError(f"no config of the {space} space fits {gpu.name}: give another space or GPU")
    spilled = launch_parts(shape, gpu, "up", 64, config_table(configs).astype(float)).spilled
    configs = [config for config, s in zip(configs, spilled, strict=True) if s == 0] or configs
    rows = np.array([config.block_size_m for config in configs])
    found = {}
    for m in batch_sizes:
        us: dict[Role, Any] = {role: predict_us(shape, gpu, role, m, configs) for role in ROLES}
        default = [engines.get(engine).default_config(shape, m, gpu)]
        before = sum(float(predict_us(shape, gpu, role, m, default)[0]) for role in ROLES)
        if mode == "joint":
            total = us["up"] + us["down"]
            best = int(np.argmin(total))
            pair = (best, best)
        else:
            by_rows = []
            for block_m in np.unique(rows):
                mine = np.flatnonzero(rows == block_m)
                by_rows.append((int(mine[np.argmin(us["up"][mine])]), int(mine[np.argmin(us["down"][mine])])))
            pair = min(by_rows, key=lambda p: us["up"][p[0]] + us["down"][p[1]])
        after = float(us["up"][pair[0]] + us["down"][pair[1]])
        found[m] = Suggestion(m, configs[pair[0]], configs[pair[1]], after, before)
    return found


def write_suggestions(
    engine: str,
    directory: Path,
    shape: MoEShape,
    gpu: GpuSpec,
    triton_version: str,
    found: dict[int, Suggestion],
) -> list[Path]:
    """Writes config files into a directory that holds no measured ones, and a marker beside them.

    Args:
        engine: Its name; where one file serves both roles the suggestions must be of joint mode.
        directory: New, or one that :func:`write_suggestions` wrote before.
        shape: The layer.
        gpu: Gives the device name.
        triton_version: Of the server.
        found: Of :func:`suggest`.

    Returns:
        The written paths, the marker last.

    Raises:
        ExportError: The directory holds other config files, or cannot be written.
    """
    marker = directory / MARKER
    if directory.exists() and not marker.exists() and any(directory.rglob("*.json")):
        raise ExportError(
            f"{directory} holds config files that may be measured, and these are not: give a new directory"
        )
    # The marker first: were the rest cut short, what is there is still marked.
    summary: dict[str, Any] = {
        "measured": False,
        "note": "ranked by a cost model, not measured: tune on the GPU before you rely on these files",
        "gpu": gpu.name,
        "shape": shape.to_dict(),
        "batch_sizes": {
            str(m): {
                **s.pair.to_dict(),
                "predicted_us": round(s.predicted_us, 1),
                "predicted_default_us": round(s.predicted_default_us, 1),
            }
            for m, s in sorted(found.items())
        },
    }
    write_file(marker, json.dumps(summary, indent=2) + "\n")
    table = ConfigTable({m: s.pair for m, s in found.items()}, joint=not engines.get(engine).split)
    paths = export_configs(engine, directory, shape, gpu.name, triton_version, table, replace=True, unmeasured=True)
    return [*paths, marker]
