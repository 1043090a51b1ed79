"""Architectures and the code paths of tiles; an architecture that nobody has is one row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from moeopt.compile.occupancy import occupancy
from moeopt.core.architecture import ARCHITECTURES, Architecture, architecture_of
from moeopt.core.code_path import code_path, converted_bytes, pipeline_bytes
from moeopt.core.config import LaunchConfig
from moeopt.core.dtypes import DTYPES
from moeopt.core.gpu import GPUS, GpuSpec
from moeopt.core.limits import shared_bytes, unsupported_reason
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Resources
from moeopt.costmodel.model import predict_us
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.tuning.options import TuneRequest
from moeopt.tuning.plan import make_plan

FP8 = MoEShape(8, 2, 512, 256, "fp8_w8a8", (128, 128))
BF16 = MoEShape(8, 2, 512, 256)
SMALL, LARGE = LaunchConfig(16, 64, 64, 1, 4, 3), LaunchConfig(64, 128, 64, 1, 4, 3)


@pytest.mark.parametrize(
    ("capability", "like"),
    [((9, 0), (9, 0)), ((9, 1), (9, 0)), ((10, 1), (10, 0)), ((10, 9), (10, 3)), ((8, 8), (8, 7)), ((12, 5), (12, 1))],
)
def test_a_minor_version_is_like_the_one_before(capability: tuple[int, int], like: tuple[int, int]) -> None:
    assert architecture_of(capability) == ARCHITECTURES[like]


def test_a_major_version_that_nobody_knows_runs_mma() -> None:
    assert architecture_of((7, 5)) == Architecture(fp8=False, dependent_launch=False)
    assert architecture_of((11, 0)) == architecture_of((13, 7)) == Architecture()


def test_schemes_that_a_gpu_lacks_are_refused_in_one_line() -> None:
    a100, ada = GpuSpec.by_name("A100"), GpuSpec.by_name("L40S")
    reason = unsupported_reason(FP8, a100)
    assert reason is not None and "\n" not in reason and "compute capability 8.9 or more" in reason and "8.0" in reason
    assert unsupported_reason(FP8, ada) is unsupported_reason(BF16, a100) is None


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_and_many_give_the_same(capability: tuple[int, int], dtype: str) -> None:
    """The cost model's arrays and the limits' single configs."""
    architecture, spec = ARCHITECTURES[capability], DTYPES[dtype]
    tiles = list(itertools.product((16, 64, 128), (32, 64, 256), (64, 128), (2, 4, 8), (2, 3, 5)))
    bm, bn, bk, warps, stages = np.array(tiles, dtype=float).T
    many = code_path(architecture, spec, bm, bn, warps)
    bytes_ = pipeline_bytes(many, spec, bm, bn, bk, stages) + converted_bytes(many, spec, bn, bk)
    for row, (m, n, k, w, s) in enumerate(tiles):
        one = code_path(architecture, spec, m, n, w)
        assert (one.from_shared, one.swapped) == (many.from_shared[row], many.swapped[row])
        assert pipeline_bytes(one, spec, m, n, k, s) + converted_bytes(one, spec, n, k) == bytes_[row]


def test_paths() -> None:
    hopper, blackwell, ampere = (ARCHITECTURES[row] for row in ((9, 0), (10, 0), (8, 0)))
    bf16, fp8, int8 = DTYPES["bf16"], DTYPES["fp8_w8a8"], DTYPES["int8_w8a8"]
    assert code_path(hopper, bf16, 64, 32, 4) == (True, False)
    assert code_path(hopper, bf16, 64, 32, 2) == (False, False), "four warps issue one instruction"
    assert code_path(hopper, bf16, 32, 64, 4) == (False, False)
    assert code_path(hopper, fp8, 32, 64, 4) == (True, True)
    assert code_path(hopper, fp8, 32, 64, 2) == (False, True)
    assert code_path(blackwell, fp8, 32, 64, 4) == (False, False)
    assert code_path(blackwell, fp8, 64, 64, 4) == (True, False)
    assert code_path(blackwell, int8, 64, 64, 4) == (False, False), "Triton has no tcgen05 for int8"
    assert code_path(ampere, bf16, 128, 128, 8) == (False, False)


class TestMadeUp:
    """Compute capability 13.0 with Hopper's instruction: a row of an architecture, and one of a GPU."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> GpuSpec:
        monkeypatch.setitem(ARCHITECTURES, (13, 0), Architecture(20, "wgmma", mma_rate=0.62))
        gpu = replace(GpuSpec.by_name("H200"), name="NVIDIA Z1", compute_capability=(13, 0))
        monkeypatch.setitem(GPUS, "z1", gpu)
        return gpu

    def test_limits(self, gpu: GpuSpec) -> None:
        h200 = GpuSpec.by_name("H200")
        for shape, config in itertools.product((FP8, BF16), (SMALL, LARGE)):
            assert shared_bytes(config, shape, "up", gpu) == shared_bytes(config, shape, "up", h200)
        few = occupancy(Resources(16, 0, 0), LaunchConfig(16, 32, 64, 1, 1, 2), gpu)
        assert (few.blocks, few.limited_by) == (20, "blocks")

    def test_kernel(self, gpu: GpuSpec) -> None:
        from moeopt.kernels.builtin_launch import options_for

        BuiltinKernel().check(FP8, gpu)
        options = options_for(FP8, "up", SMALL, gpu.compute_capability)
        assert options == options_for(FP8, "up", SMALL, (9, 0))
        assert options["SWAP_AB"] and options["DEPENDENT_LAUNCH"] and options["launch_pdl"]

    def test_cost_model_and_plan(self, gpu: GpuSpec) -> None:
        h200 = GpuSpec.by_name("H200")
        here, there = (predict_us(FP8, one, "up", 64, [SMALL, LARGE], corrected=False) for one in (gpu, h200))
        np.testing.assert_array_equal(here, there)
        np.testing.assert_array_equal(here, predict_us(FP8, gpu, "up", 64, [SMALL, LARGE]))  # no tree knows it
        plans = [make_plan(TuneRequest(FP8, name, batch_sizes=(64,)), "3.6.0") for name in ("Z1", "H200")]
        assert plans[0].gpu == gpu and plans[0].legal == plans[1].legal > 0
        assert "device_name=NVIDIA_Z1" in plans[0].engines["sglang"].files[0]
