"""What fits a GPU, computed without compiling: counted over whole grids, and against compiled binaries' numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moeopt
from moeopt import GpuSpec, LaunchConfig, MoEShape, SearchSpace
from moeopt.core.limits import illegal_reason, shared_bytes
from moeopt.recordings.format import Recording

RECORDINGS = Path(moeopt.__file__).parent / "recordings" / "data"
SM120 = GpuSpec.by_name("RTX PRO 6000 Blackwell Workstation Edition")
H200 = GpuSpec.by_name("H200")
BF16 = MoEShape(256, 8, 3072, 256)
FP8 = MoEShape(256, 8, 3072, 256, "fp8_w8a8")
BLOCK_FP8 = MoEShape(256, 8, 6144, 256, "fp8_w8a8", block_shape=(128, 128))


def legal(shape: MoEShape, gpu: GpuSpec) -> int:
    return sum(illegal_reason(c, shape, "up", gpu) is None for c in SearchSpace.grid(shape).configs())


@pytest.mark.parametrize(
    ("shape", "gpu", "count"),
    [(BF16, SM120, 976), (FP8, SM120, 1456), (BLOCK_FP8, SM120, 1128), (BLOCK_FP8, H200, 1248)],
)
def test_share_of_the_grid_that_fits(shape: MoEShape, gpu: GpuSpec, count: int) -> None:
    """As many as compiled for SM120 and fitted (of 1,920, and of 1,280 for block fp8), and as ran on an H200."""
    assert legal(shape, gpu) == count


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("h200-*.jsonl.gz")), ids=lambda p: p.name)
def test_recordings_agree(path: Path) -> None:
    """What ran on the GPU is legal, and what was out of resources there is not."""
    recording = Recording.load(path)
    statuses = Counter[tuple[str, bool]]()
    for config, row in recording.rows.items():
        reasons = [illegal_reason(config, recording.shape, role, recording.gpu) for role in ("up", "down")]
        statuses[row.status, any(reasons)] += 1
    assert statuses["ok", False] > len(recording.rows) // 4
    assert statuses["ok", True] == statuses["out_of_resources", False] == 0


@pytest.mark.parametrize(
    ("shape", "config", "gpu", "expected"),
    [
        # (num_stages - 1) * (BM + BN) * BK * itemsize, as compiled for SM120
        (BF16, LaunchConfig(64, 128, 64, 1, 4, 3), SM120, 2 * (64 + 128) * 64 * 2),
        (BF16, LaunchConfig(64, 128, 64, 1, 4, 3), H200, 3 * (64 + 128) * 64 * 2),
        (BF16, LaunchConfig(32, 128, 64, 1, 4, 3), H200, 2 * (32 + 128) * 64 * 2),
        (FP8, LaunchConfig(64, 128, 128, 1, 4, 4), SM120, 3 * (64 + 128) * 128),
        (FP8, LaunchConfig(32, 128, 128, 1, 4, 4), H200, 4 * (32 + 128) * 128),
        (FP8, LaunchConfig(32, 32, 128, 1, 4, 4), H200, 3 * (32 + 32) * 128),
        (MoEShape(8, 2, 64, 64, "int8_w8a16"), LaunchConfig(16, 64, 64, 1, 4, 2), SM120, 16 * 64 * 2 + 64 * 64),
    ],
)
def test_shared_bytes(shape: MoEShape, config: LaunchConfig, gpu: GpuSpec, expected: int) -> None:
    assert shared_bytes(config, shape, "up", gpu) == expected


def test_reasons_are_one_line_with_the_numbers() -> None:
    text = illegal_reason(LaunchConfig(256, 256, 256, 1, 8, 5), BF16, "up", SM120)
    assert text is not None and "1,048,576 bytes" in text and "101,376" in text
    text = illegal_reason(LaunchConfig(16, 32, 256, 1, 4, 2), BLOCK_FP8, "down", SM120)
    assert text is not None and "BLOCK_SIZE_K 256 is over block_k 128" in text
    text = illegal_reason(LaunchConfig(16, 32, 64, 1, 64, 2), BF16, "up", SM120)
    assert text is not None and "64 warps" in text and "32 per block" in text
    text = illegal_reason(LaunchConfig(16, 32, 64, 1, 32, 2, maxnreg=168), BF16, "up", SM120)
    assert text is not None and "registers of 65,536" in text
    assert illegal_reason(LaunchConfig(16, 32, 64, 1, 8, 2, maxnreg=168), BF16, "up", SM120) is None


@given(
    st.sampled_from(SearchSpace.wide(BF16).configs()),
    st.sampled_from(["num_stages", "block_size_n", "block_size_k"]),
    st.sampled_from([SM120, H200]),
)
def test_what_does_not_fit_does_not_fit_when_larger(config: LaunchConfig, field: str, gpu: GpuSpec) -> None:
    larger = replace(config, **{field: 2 * getattr(config, field)})
    assert shared_bytes(larger, BF16, "up", gpu) >= shared_bytes(config, BF16, "up", gpu)
    if illegal_reason(config, BF16, "up", gpu) is not None:
        assert illegal_reason(larger, BF16, "up", gpu) is not None


@given(st.sampled_from(SearchSpace.grid(BF16).configs()), st.integers(1, 64))
def test_group_size_changes_nothing(config: LaunchConfig, group: int) -> None:
    other = replace(config, group_size_m=group)
    assert (illegal_reason(config, BF16, "up", SM120) is None) == (illegal_reason(other, BF16, "up", SM120) is None)
