"""The config files that SGLang and vLLM ship for SM120 parts: all legal by our rule, and they compile."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from moeopt.compile import CompilePool
from moeopt.kernels import get_kernel
from moeopt.resources import illegal_reason, shared_bytes
from moeopt.shape import ROLES
from moeopt.space import LaunchConfig
from tests.sm120_files import ShippedFile, shipped_files

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def files() -> list[ShippedFile]:
    return list(shipped_files())


def test_there_are_as_many_as_we_know(files: list[ShippedFile]) -> None:
    assert sum(f.engine == "sglang" for f in files) >= 7
    assert sum(f.engine == "vllm" for f in files) >= 8


def test_every_shipped_config_is_legal(files: list[ShippedFile]) -> None:
    broken = [
        f"{file.label} M={m}: {config}: {reason}"
        for file in files
        for m, config in file.configs.items()
        for role in ROLES
        if (reason := illegal_reason(config, file.shape, role, file.gpu))
    ]
    assert broken == []


def test_shipped_tiles_compile(files: list[ShippedFile], tmp_path: Path) -> None:
    """Four distinct tiles of each scheme: GROUP_SIZE_M does not matter to the compiler, nor do N and K."""
    schemes: dict[tuple[object, ...], list[ShippedFile]] = defaultdict(list)
    for file in files:
        schemes[(file.gpu.sm, file.shape.dtype, file.shape.block_shape, file.shape.per_channel)].append(file)
    broken = []
    for (first, *_), tiles in ((group, _tiles(group)) for group in schemes.values()):
        with CompilePool(get_kernel("builtin"), first.shape, first.gpu.compute_capability, 2, tmp_path) as pool:
            futures = {tile: pool.submit(tile, "up", 64) for tile in tiles[:: max(1, len(tiles) // 3)]}
            for tile, future in futures.items():
                compiled = future.result()
                if compiled.failure is not None:
                    broken.append(f"{first.label}: {tile}: {compiled.failure.message}")
                else:
                    assert compiled.resources.shared_bytes == shared_bytes(tile, first.shape, "up", first.gpu)
    assert broken == []


def _tiles(files: list[ShippedFile]) -> list[LaunchConfig]:
    return sorted({_without_group(config) for file in files for config in file.configs.values()})


def _without_group(c: LaunchConfig) -> LaunchConfig:
    return LaunchConfig(c.block_size_m, c.block_size_n, c.block_size_k, 1, c.num_warps, c.num_stages)
