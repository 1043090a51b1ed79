"""SGLang's kernel through its adapter, on published SGLang."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.errors import UnsupportedShapeError
from moeopt.kernels.sglang import SglangKernel
from moeopt.kernels.target import cross_target
from moeopt.testing.suites import KernelTestCase
from tests.kernels.engine_cases import CASES
from tests.kernels.engine_checks import COMPILED, GPUS, check_compiles, check_interpreted
from tests.wheels import SGLANG, SGLANG_VERSIONS, engine_source

pytestmark = [pytest.mark.network, pytest.mark.slow]
BLOCK = MoEShape(32, 4, 256, 128, "fp8_w8a8", (128, 128))
CONFIG = LaunchConfig(32, 64, 128, 8, 4, 3)


@pytest.fixture(params=SGLANG_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernel(version: str) -> SglangKernel:
    return SglangKernel(engine_source("sglang", version))


class TestSglangKernel(KernelTestCase):
    """Results are checked by :func:`test_results_on_the_cpu` and on a GPU."""

    @pytest.fixture
    def make_kernel(self, version: str) -> Callable[[], SglangKernel]:
        return functools.partial(SglangKernel, engine_source("sglang", version))

    @pytest.fixture(params=COMPILED)
    def shapes(self, request: pytest.FixtureRequest) -> list[MoEShape]:
        return [COMPILED[request.param]]


def test_key_names_the_version(kernel: SglangKernel, version: str) -> None:
    assert kernel.key.name == "sglang"
    assert kernel.key.version == version


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("case", "shared"), [("bf16", 24576), ("fp8 block", 12288), ("int4", 16384)])
def test_cross_compiles(kernel: SglangKernel, case: str, shared: int, capability: tuple[int, int]) -> None:
    # Three stages are two buffers; where fp8 operands are swapped for wgmma, three.
    if case == "fp8 block" and capability == (9, 0) and "swap_ab" in kernel.arg_names():
        shared = 18432
    check_compiles(kernel, COMPILED[case], capability, shared=shared)


def test_tma_down_compiles(kernel: SglangKernel) -> None:
    with cross_target((12, 0)):
        tma = kernel.compile(BLOCK, "down", 4, LaunchConfig(32, 64, 64, 8, 4, 3, use_tma=True))
        plain = kernel.compile(BLOCK, "down", 4, LaunchConfig(32, 64, 64, 8, 4, 3))
    # The same buffers, and the barriers on which loads through TMA are awaited.
    assert plain.shared_bytes < tma.shared_bytes < plain.shared_bytes + 256


def test_results_on_the_cpu(kernel: SglangKernel, version: str, tmp_path: Path) -> None:
    cases = CASES if version == SGLANG else ("bf16", "fp8 block", "w4a16 group")
    check_interpreted("sglang", kernel.source.path, cases, tmp_path)


@pytest.mark.parametrize(
    ("capability", "block_m", "swapped"), [((9, 0), 32, True), ((9, 0), 64, False), ((12, 0), 32, False)]
)
def test_operands_are_swapped_as_served(capability: tuple[int, int], block_m: int, swapped: bool) -> None:
    new, old = (SglangKernel(engine_source("sglang", v)) for v in (SGLANG, "0.5.5"))
    config = LaunchConfig(block_m, 64, 128, 8, 4, 3)
    assert new.meta_launch(BLOCK, "up", 4, config, capability).named()["swap_ab"] is swapped
    assert new.meta_launch(COMPILED["bf16"], "up", 4, config, capability).named()["swap_ab"] is False
    assert "swap_ab" not in old.meta_launch(BLOCK, "up", 4, config, capability).named()


@pytest.mark.parametrize(("capability", "dependent"), [((9, 0), True), ((12, 0), True), ((8, 9), False)])
def test_dependent_launch_as_served(capability: tuple[int, int], dependent: bool) -> None:
    new, old = (SglangKernel(engine_source("sglang", v)) for v in (SGLANG, "0.5.5"))
    few, many = (new.meta_launch(BLOCK, "up", m, CONFIG, capability).named() for m in (512, 513))
    assert (few.get("launch_pdl"), few.get("USE_GDC"), few.get("GDC_EARLY")) == (
        (True,) * 3 if dependent else (None,) * 3
    )
    assert many.get("GDC_EARLY") is (False if dependent else None)
    assert "launch_pdl" not in old.meta_launch(BLOCK, "up", 4, CONFIG, capability).named()


def test_arguments_of_both_roles(kernel: SglangKernel) -> None:
    up, down = (kernel.meta_launch(BLOCK, role, 6, CONFIG, (12, 0)).named() for role in ("up", "down"))
    assert (up["N"], up["K"], up["top_k"], up["MUL_ROUTED_WEIGHT"]) == (256, 256, 4, False)
    assert (down["N"], down["K"], down["top_k"], down["MUL_ROUTED_WEIGHT"]) == (256, 128, 1, True)
    assert up["num_valid_tokens"] == down["num_valid_tokens"] == 24
    assert (up["group_n"], up["group_k"], up["even_Ks"]) == (128, 128, True)
    assert up["stride_cm"] == 256


def test_few_pairs_launch_few_programs() -> None:
    new, old = (SglangKernel(engine_source("sglang", v)) for v in (SGLANG, "0.5.5"))
    # 4 pairs among 32 experts: 4 tiles of rows, or as many as the experts could need.
    assert new.meta_launch(BLOCK, "up", 1, CONFIG, (9, 0)).grid == (4 * 4,)
    assert old.meta_launch(BLOCK, "up", 1, CONFIG, (9, 0)).grid == (4 * -(-(4 + 33 * 31) // 32),)


def test_grouped_weights_go_through_the_gptq_kernel(kernel: SglangKernel) -> None:
    launch = kernel.meta_launch(COMPILED["int4"], "up", 4, CONFIG, (12, 0))
    named = launch.named()
    assert (named["use_int4_w4a16"], named["has_zp"], named["group_size"]) == (True, False, 64)
    assert "fused_moe_kernel_gptq_awq" in launch.kernel.__name__
    channel = kernel.meta_launch(CASES["w8a16 channel"], "up", 4, CONFIG, (12, 0))
    assert channel.named()["use_int8_w8a16"] is True
    assert "gptq" not in channel.kernel.__name__


def test_tma_is_one_more_parameter_of_the_down_projection(kernel: SglangKernel) -> None:
    tma = LaunchConfig(32, 64, 128, 8, 4, 3, use_tma=True)
    assert kernel.space_extras(BLOCK, GPUS[12, 0]) == ("maxnreg", "USE_TMA")
    assert kernel.space_extras(COMPILED["bf16"], GPUS[12, 0]) == ("maxnreg",)
    assert kernel.space_extras(BLOCK, GpuSpec.by_name("L40S")) == ("maxnreg",)
    assert kernel.illegal_reason(tma, BLOCK, "down", GPUS[12, 0]) is None
    assert "down projection" in str(kernel.illegal_reason(tma, BLOCK, "up", GPUS[12, 0]))
    assert "tensor memory" in str(kernel.illegal_reason(tma, BLOCK, "down", GpuSpec.by_name("L40S")))
    launch = kernel.meta_launch(BLOCK, "down", 4, tma, (12, 0)).named()
    assert launch["a_desc"].block_shape == [32, 128]
    assert launch["b_desc"].block_shape == [1, 64, 128]
    assert kernel.meta_launch(BLOCK, "down", 4, CONFIG, (12, 0)).named()["a_desc"] is None


def test_no_weights_are_kept(kernel: SglangKernel) -> None:
    launch = kernel.meta_launch(BLOCK, "down", 4, LaunchConfig(32, 64, 128, 8, 4, 3, use_tma=True), (12, 0))
    weights = weakref.ref(launch.named()["b_desc"].base)
    assert weights() is not None
    del launch
    gc.collect()
    assert weights() is None


def test_equal_specialisations_share_a_binary(kernel: SglangKernel) -> None:
    shape, sizes = COMPILED["bf16"], (4, 8, 96, 100)
    names = {m: kernel.specialisation(shape, "up", m) for m in sizes}
    hashes = {}
    with cross_target((12, 0)):
        for m in sizes:
            hashes[m] = kernel.meta_launch(shape, "up", m, CONFIG, (12, 0)).warmup().hash
    for one in sizes:
        for other in sizes:
            assert names[one] != names[other] or hashes[one] == hashes[other]
    assert len(set(names.values())) < len(sizes)


@pytest.mark.parametrize(
    ("shape", "config", "reason"),
    [
        (MoEShape(8, 2, 192, 192, "fp8_w8a8", (96, 64)), LaunchConfig(16, 64, 64, 1, 4, 3), "BLOCK_SIZE_N 64"),
        (BLOCK, LaunchConfig(16, 64, 256, 1, 4, 3), "BLOCK_SIZE_K 256"),
        (COMPILED["int4"], LaunchConfig(16, 64, 512, 1, 4, 2), "BLOCK_SIZE_K 512 does not divide K 256"),
        (BLOCK, LaunchConfig(16, 48, 64, 1, 4, 3), "BLOCK_SIZE_N is 48"),
        (COMPILED["bf16"], LaunchConfig(128, 128, 128, 1, 4, 5), "shared memory"),
    ],
)
def test_illegal_before_compiling(kernel: SglangKernel, shape: MoEShape, config: LaunchConfig, reason: str) -> None:
    assert reason in str(kernel.illegal_reason(config, shape, "up", GPUS[12, 0]))


@pytest.mark.parametrize(
    ("shape", "gpu", "message"),
    [
        (MoEShape(8, 2, 256, 128, "int8_w8a8"), "H200", "per channel or per block"),
        (MoEShape(8, 2, 256, 128, "fp8_w8a8"), "A100", "compute capability 8.9"),
    ],
)
def test_refused_shapes(kernel: SglangKernel, shape: MoEShape, gpu: str, message: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=message):
        kernel.check(shape, GpuSpec.by_name(gpu))


def test_default_is_sglangs(kernel: SglangKernel) -> None:
    assert kernel.default_config(BLOCK, "up", 64, GPUS[12, 0]) == LaunchConfig(64, 128, 128, 32, 4, 3)
