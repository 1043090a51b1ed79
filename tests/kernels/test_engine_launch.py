"""Recording an engine's launch, and refusing one that is not known."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError, UnsupportedShapeError
from moeopt.kernels.engine_align import align_to, aligned_rows
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.sglang import SglangKernel
from tests.kernels import tiny_engine

SHAPE = MoEShape(8, 2, 64, 32)
CONFIG = LaunchConfig(16, 32, 64, 1, 4, 3, maxnreg=96)
H200 = GpuSpec.by_name("H200")


def record(path: Path, batch_size: int = 4) -> dict[str, object]:
    return SglangKernel(path).meta_launch(SHAPE, "up", batch_size, CONFIG, (9, 0)).named()


def test_what_the_engine_passes_is_kept(tmp_path: Path) -> None:
    launch = SglangKernel(tiny_engine.write(tmp_path)).meta_launch(SHAPE, "up", 4, CONFIG, (9, 0))
    named = launch.named()
    assert (named["N"], named["K"], named["num_valid_tokens"]) == (64, 64, 8)
    assert named["swap_ab"] is True
    assert named["maxnreg"] == 96
    assert launch.grid == (named["EM"] // 16,)


def test_capability_is_that_of_the_launch(tmp_path: Path) -> None:
    kernel = SglangKernel(tiny_engine.write(tmp_path))
    swapped = [kernel.meta_launch(SHAPE, "up", 4, CONFIG, c).named()["swap_ab"] for c in ((9, 0), (12, 0), (9, 0))]
    assert swapped == [True, False, True]


LAUNCH = "    fused_moe_kernel[grid]("
NEEDS_SM90 = "return is_sm90_supported()"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("weight: bool, top_k: int,", "weight: bool, top_k: int, phase,")],
            "needs phase, which .* expected among A, B",
        ),
        ([("GROUP_SIZE_M: tl.constexpr,", "GROUP: tl.constexpr,")], "expected .*top_k.* and GROUP_SIZE_M is missing"),
        ([("fused_moe_kernel_gptq_awq = fused_moe_kernel", "")], "unknown signature: expected the arguments a_ptr"),
        ([("def invoke_fused_moe_kernel(", "def start(")], "has no function invoke_fused_moe_kernel"),
        ([(LAUNCH, "    (lambda *_, **__: None)(")], "made 0 launches of the fused MoE kernel, expected 1"),
        ([(LAUNCH, "    A.fused(")], "has no attribute 'fused'"),
        (
            [("is_sm90_supported, r", "is_sm99, r"), (NEEDS_SM90, "return is_sm99()")],
            r"calls sglang\.srt\.utils\.is_sm99",
        ),
    ],
)
def test_unknown_launch_is_a_clear_error(tmp_path: Path, changes: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=message) as caught:
        SglangKernel(tiny_engine.write(tmp_path, *changes)).check(SHAPE, H200)
    assert "builtin" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_engine_refuses_is_refused(tmp_path: Path) -> None:
    kernel = SglangKernel(tiny_engine.write(tmp_path))
    with pytest.raises(UnsupportedShapeError, match="no blocks here"):
        kernel.check(MoEShape(8, 2, 128, 128, "fp8_w8a8", (128, 128)), H200)


def test_pool_and_worker_get_the_same_kernel(tmp_path: Path) -> None:
    kernel = SglangKernel(tiny_engine.write(tmp_path))
    kernel.specialisation(SHAPE, "up", 4)
    copy = pickle.loads(pickle.dumps(kernel))
    assert copy == kernel
    assert copy.key == kernel.key
    assert len(pickle.dumps(kernel)) < 1000


def test_specialisation_follows_the_arguments(tmp_path: Path) -> None:
    kernel = SglangKernel(tiny_engine.write(tmp_path))
    names = {m: kernel.specialisation(SHAPE, "up", m) for m in (1, 3, 8, 16, 64)}
    # 2 and 6 pairs are not divisible by 16; 16, 32 and 128 are.
    assert names[1] == names[3] != names[8] == names[16] == names[64]
    # One pair in all: Triton makes the integer 1 a constant.
    single = MoEShape(8, 1, 64, 32)
    assert kernel.specialisation(single, "up", 1) != kernel.specialisation(single, "up", 3)
    assert kernel.specialisation(SHAPE, "up", 8) != kernel.specialisation(SHAPE, "down", 8)


def test_absent_experts_need_expert_parallelism(tmp_path: Path) -> None:
    kernel = SglangKernel(tiny_engine.write(tmp_path))
    layer = make_layer(SHAPE, device="cpu", seed=0)
    batch = make_batch(layer, "up", torch.tensor([[0, -1]]), seed=0)
    out = torch.empty(2, 64, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="ep_size is 1"):
        kernel.bind(layer, "up", batch, CONFIG, out)


@pytest.mark.parametrize(("pairs", "experts", "rows"), [(6, 8, 6 * 16), (8, 8, 8 + 8 * 15), (100, 8, 100 + 8 * 15)])
def test_bound_on_rows(pairs: int, experts: int, rows: int) -> None:
    assert aligned_rows(pairs, experts, 16) == rows


@pytest.mark.parametrize("rows", [64, 130, 400])
def test_alignment_has_the_engine_s_length(rows: int) -> None:
    ids = torch.tensor([[0, 3], [3, 2], [0, 3]], dtype=torch.int32)
    sorted_ids, expert_ids, used = align_to(ids, 4, 16, rows)
    assert sorted_ids.numel() == rows
    assert expert_ids.numel() == -(-rows // 16)
    assert used.item() == 48
    assert expert_ids[:3].tolist() == [0, 2, 3]
    assert sorted_ids[[0, 1, 16, 32, 33, 34]].tolist() == [0, 4, 3, 1, 2, 5]
    assert (sorted_ids == 6).sum() == rows - 6
    meta = align_to(ids.to("meta"), 4, 16, rows)
    assert [t.shape for t in meta] == [t.shape for t in (sorted_ids, expert_ids, used)]
