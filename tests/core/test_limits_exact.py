"""The shared-memory rule against the compiler: its own numbers, recorded, measured on a GPU, and compiled now.

``tests/data/resources`` holds what ``benchmarks/compile_grid.py`` got from the compiler.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moeopt.compile.occupancy import occupancy
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import illegal_reason, shared_bytes
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Resources
from moeopt.kernels.engine import engine_shared_bytes
from moeopt.recordings.format import Recording

ROOT = Path(__file__).parents[2]
COMPILED = sorted((ROOT / "tests" / "data" / "resources").glob("*.json.gz"))
RECORDINGS = sorted((ROOT / "studies" / "recordings").glob("*.jsonl.gz"))
GPU_OF = {
    (12, 0): GpuSpec.by_name("NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    (9, 0): GpuSpec.by_name("NVIDIA H200"),
    (10, 0): GpuSpec.by_name("NVIDIA B200"),
}
# Tiles that an engine's own kernel does not compile for. SGLang 0.5.23 swaps the operands of narrow fp8 tiles on Hopper
# and then indexes a scale that is one number: Triton 3.6 let that pass.
UPSTREAM_FAILS = {"sglang-triton3.9.0-sm90-fp8-block": 128}
RTX_PRO, H200 = GPU_OF[(12, 0)], GPU_OF[(9, 0)]
BF16 = MoEShape(256, 8, 3072, 256)
FP8 = MoEShape(256, 8, 6144, 256, "fp8_w8a8", per_channel=True)
INT8_WEIGHTS = MoEShape(8, 2, 512, 256, "int8_w8a16")
BLOCK_FP8 = MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128))


def test_there_is_data_for_both_architectures() -> None:
    names = [path.name for path in COMPILED]
    for sm in ("sm120", "sm90"):
        for scheme in ("bf16", "fp8", "fp8-channel", "fp8-block", "int8-channel", "int8-group", "int4-group"):
            assert any(sm in name and name.endswith(f"-{scheme}.json.gz") for name in names), (sm, scheme)


@pytest.mark.parametrize("path", COMPILED, ids=lambda p: p.name.removesuffix(".json.gz"))
def test_exact_against_the_compiler(path: Path) -> None:
    data: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    shape, gpu = MoEShape.from_dict(data["shape"]), GPU_OF[tuple(data["capability"])]
    limit = gpu.shared_memory_per_block_optin
    # Triton 3.9 widens group-wise scales before it moves them, where one group covers the step: 2 bytes more a
    # column, under the 1 KiB that tells a config that fits from one that does not.
    triton = tuple(map(int, data["triton"].split(".")))
    float_scales = triton >= (3, 9) and data["kernel"] == "builtin" and shape.group_size
    wrong, verdicts = [], Counter[tuple[bool, bool]]()
    for name, compiled in data["shared"].items():
        *numbers, role = name.split()
        bm, bn, bk, warps, stages = map(int, numbers)
        config = LaunchConfig(bm, bn, bk, 1, warps, stages)
        if isinstance(compiled, str):  # the compiler failed before it allocated anything
            continue
        if data["kernel"] == "builtin":
            ours = shared_bytes(config, shape, role, gpu)
        else:
            ours = engine_shared_bytes(data["kernel"], config, shape, role, gpu, triton)
        if ours != compiled and not (float_scales and compiled == ours + 2 * bn):
            wrong.append((name, ours, compiled))
        verdicts[(illegal_reason(config, shape, role, gpu, shared=ours) is None, compiled <= limit)] += 1
    assert wrong == []
    assert verdicts[(True, False)] == verdicts[(False, True)] == 0
    compiled_at_all = UPSTREAM_FAILS.get(path.name.removesuffix(".json.gz"), 0) + sum(verdicts.values())
    assert compiled_at_all >= 0.9 * len(data["shared"]) > 10


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.name.split(".")[0])
def test_exact_on_a_gpu(path: Path) -> None:
    recording = Recording.load(path)
    for config, row in recording.rows.items():
        for role in ROLES:
            legal = illegal_reason(config, recording.shape, role, recording.gpu) is None
            if row.status == "ok":
                assert legal, config
                assert row.roles[role].shared_bytes == shared_bytes(config, recording.shape, role, recording.gpu)
            elif row.status == "out_of_resources":
                assert not legal, config


@pytest.mark.parametrize(("shape", "configs", "legal"), [(BF16, 1920, 976), (FP8, 1920, 1456), (BLOCK_FP8, 1280, 1128)])
def test_legal_configs_of_an_sm120_part(shape: MoEShape, configs: int, legal: int) -> None:
    space = SearchSpace.grid(shape)
    assert len(space) == configs
    assert sum(illegal_reason(config, shape, "up", RTX_PRO) is None for config in space.configs()) == legal


@pytest.mark.parametrize(
    ("shape", "gpu", "config", "compiled"),
    [
        (BF16, "NVIDIA H200", LaunchConfig(128, 64, 256, 1, 2, 2), 98304),
        (BF16, "NVIDIA H200", LaunchConfig(64, 64, 128, 1, 2, 8), 229376),
        (FP8, "NVIDIA H200", LaunchConfig(16, 128, 64, 1, 2, 8), 64512),
        (BLOCK_FP8, "NVIDIA H200", LaunchConfig(256, 128, 32, 1, 2, 4), 37888),
        (BLOCK_FP8, "NVIDIA B200", LaunchConfig(256, 256, 128, 1, 4, 3), 198672),
        (INT8_WEIGHTS, "NVIDIA H200", LaunchConfig(128, 64, 64, 1, 2, 3), 40960),
        (INT8_WEIGHTS, "NVIDIA H200", LaunchConfig(64, 64, 64, 1, 4, 3), 40960),
        (INT8_WEIGHTS, "NVIDIA H200", LaunchConfig(32, 64, 64, 1, 4, 3), 16384),
        (INT8_WEIGHTS, "NVIDIA B200", LaunchConfig(64, 64, 64, 1, 4, 3), 40976),
        (INT8_WEIGHTS, "NVIDIA B200", LaunchConfig(128, 128, 128, 1, 4, 3), 163856),
    ],
)
def test_wide_space(shape: MoEShape, gpu: str, config: LaunchConfig, compiled: int) -> None:
    """As the compiler said: with two warps Hopper's tensor cores read registers.

    8-bit weights of 16-bit activations are converted, for tensor cores that read shared memory to a tile there (the
    numbers are those of SGLang 0.5.23's kernel, too).
    """
    assert shared_bytes(config, shape, "up", GpuSpec.by_name(gpu)) == compiled


@pytest.mark.slow
@pytest.mark.parametrize("capability", list(GPU_OF))
@pytest.mark.parametrize(
    "shape",
    [
        BF16,
        BLOCK_FP8,
        MoEShape(8, 2, 512, 256, "int8_w8a8", per_channel=True),
        MoEShape(8, 2, 512, 256, "int4_w4a16", group_size=64),
        INT8_WEIGHTS,
    ],
    ids=lambda shape: shape.slug(),
)
def test_exact_now(shape: MoEShape, capability: tuple[int, int]) -> None:
    """Whatever Triton is installed, two configs each, compiled to the end."""
    from moeopt.kernels import get_kernel
    from moeopt.kernels.target import cross_target

    gpu = GPU_OF[capability]
    with cross_target(capability):
        for config in (LaunchConfig(16, 64, 64, 1, 4, 4), LaunchConfig(64, 128, 128, 1, 4, 3)):
            compiled = get_kernel("builtin").compile(shape, "up", 64, config)
            assert compiled.shared_bytes == shared_bytes(config, shape, "up", gpu)


class TestIllegalReason:
    def test_names_the_numbers(self) -> None:
        reason = illegal_reason(LaunchConfig(256, 256, 256, 1, 8, 5), BF16, "up", RTX_PRO)
        assert reason is not None
        assert "1,048,576" in reason
        assert "101,376" in reason

    @pytest.mark.parametrize(
        ("config", "word"),
        [
            (LaunchConfig(16, 32, 256, 1, 4, 2), "block_k"),
            (LaunchConfig(16, 32, 64, 1, 64, 2), "warps"),
            (LaunchConfig(16, 32, 64, 1, 8, 2, maxnreg=512), "registers"),
        ],
    )
    def test_other_limits(self, config: LaunchConfig, word: str) -> None:
        assert word in str(illegal_reason(config, BLOCK_FP8, "up", RTX_PRO))


class TestOccupancy:
    """Worked out by hand from the rules in CUDA's programming guide."""

    @pytest.mark.parametrize(
        ("resources", "warps", "gpu", "blocks", "limit"),
        [
            (Resources(32, 0, 0), 4, H200, 16, "registers"),
            (Resources(32, 0, 0), 8, H200, 8, "registers"),
            (Resources(255, 0, 0), 4, H200, 2, "registers"),
            (Resources(40, 0, 98304), 4, H200, 2, "shared memory"),
            (Resources(40, 0, 232448), 4, H200, 1, "shared memory"),
            (Resources(16, 0, 0), 1, H200, 32, "blocks"),
            (Resources(32, 0, 0), 4, RTX_PRO, 12, "warps"),
            (Resources(40, 0, 49152), 4, RTX_PRO, 2, "shared memory"),
            (Resources(40, 0, 50688), 4, RTX_PRO, 1, "shared memory"),
            (Resources(16, 0, 0), 1, RTX_PRO, 24, "blocks"),
        ],
    )
    def test_blocks(self, resources: Resources, warps: int, gpu: GpuSpec, blocks: int, limit: str) -> None:
        found = occupancy(resources, LaunchConfig(16, 32, 64, 1, warps, 2), gpu)
        assert found.blocks == blocks
        if blocks not in (16, 8):
            assert found.limited_by == limit

    def test_what_does_not_fit(self) -> None:
        assert occupancy(Resources(255, 0, 0), LaunchConfig(16, 32, 64, 1, 16, 2), RTX_PRO).blocks == 0
