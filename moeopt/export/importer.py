"""Existing config files as launch configs: starting points, and the "existing" arm of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.core.table import ConfigPair, ConfigTable
from moeopt.errors import InvalidInputError
from moeopt.export.lookup import Lookup, find_config_files
from moeopt.export.names import ConfigName, nearest_key
from moeopt.export.read import ConfigFile, Problem, check_pair, read_config_file


@dataclass(frozen=True)
class ExistingConfigs:
    """What an engine runs today from its files.

    Attributes:
        lookup: Which files, and how they were found.
        up: Batch size -> config, in the order of the file.
        down: The same for the down projection, None where up's serves both.
        problems: What the files have beyond what stops an engine.
    """

    lookup: Lookup
    up: dict[int, LaunchConfig]
    down: dict[int, LaunchConfig] | None
    problems: tuple[Problem, ...] = ()

    def at(self, role: Role, batch_size: int) -> LaunchConfig:
        """The config that the engine launches: of the nearest batch size, down with up's BLOCK_SIZE_M."""
        up = self.up[nearest_key(list(self.up), batch_size)]
        if role == "up":
            return up
        down = self.down[nearest_key(list(self.down), batch_size)] if self.down is not None else up
        if down.block_size_m == up.block_size_m:
            return down
        return LaunchConfig.from_dict({**down.to_dict(), "BLOCK_SIZE_M": up.block_size_m})

    def table(self, batch_sizes: Iterable[int]) -> ConfigTable:
        """The configs that the engine launches at these batch sizes."""
        pairs = {m: ConfigPair(self.at("up", m), self.at("down", m)) for m in batch_sizes}
        return ConfigTable(pairs, joint=self.down is None)


def import_configs(
    engine: str,
    directory: str | Path,
    shape: MoEShape,
    gpu: GpuSpec | str,
    triton_version: str,
) -> ExistingConfigs:
    """Reads what an engine would read from a directory for a shape.

    Args:
        engine: Its name.
        directory: With the engine's files.
        shape: The layer as one GPU sees it.
        gpu: The GPU, or its name as torch reports it.
        triton_version: Of the server.

    Raises:
        InvalidInputError: There is no such file, or it is broken; one line with the first problem.
    """
    spec = gpu if isinstance(gpu, GpuSpec) else None
    name = ConfigName.of(engine, shape, gpu.name if isinstance(gpu, GpuSpec) else gpu)
    lookup = find_config_files(engine, directory, name, triton_version)
    if lookup.up.path is None:
        hint = (
            f"; near it: {lookup.near_misses[0].path.name} ({lookup.near_misses[0].why})" if lookup.near_misses else ""
        )
        raise InvalidInputError(f"{lookup.root} has no file for this shape ({lookup.up.asked.name}){hint}")
    up = _usable(read_config_file(lookup.up.path, engine=engine, gpu=spec))
    problems = list(up.problems)
    down: ConfigFile | None = None
    if lookup.down.path is not None and lookup.down.path != lookup.up.path:
        down = _usable(read_config_file(lookup.down.path, engine=engine, gpu=spec))
        problems += [*down.problems, *check_pair(up, down)]
    block_k = shape.block_shape[1] if shape.block_shape and engines.get(engine).clamps_block_k else None
    return ExistingConfigs(lookup, _launched(up, block_k), _launched(down, block_k) if down else None, tuple(problems))


def _launched(file: ConfigFile, block_k: int | None) -> dict[int, LaunchConfig]:
    """The configs as the engine launches them: a BLOCK_SIZE_K over that of the scales is cut to it."""
    configs = file.configs()
    if block_k is None:
        return configs
    return {m: replace(config, block_size_k=min(config.block_size_k, block_k)) for m, config in configs.items()}


def _usable(file: ConfigFile) -> ConfigFile:
    broken = next((p for p in file.problems if p.severity == "error"), None)
    if broken is not None:
        raise InvalidInputError(f"{file.path} cannot be used: {str(broken).removeprefix(file.path.name + ': ')}")
    return file
