"""vLLM's kernel through its adapter, on published vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.kernels.target import cross_target
from moeopt.kernels.vllm import VllmKernel
from moeopt.testing.suites import KernelTestCase
from tests.kernels.engine_cases import CASES
from tests.kernels.engine_checks import COMPILED, GPUS, check_compiles, check_interpreted
from tests.wheels import VLLM, VLLM_VERSIONS, engine_source

pytestmark = [pytest.mark.network, pytest.mark.slow]
OLD = "0.11.2"
BLOCK = MoEShape(32, 4, 256, 128, "fp8_w8a8", (128, 128))
CONFIG = LaunchConfig(32, 64, 128, 8, 4, 3)


@pytest.fixture(params=VLLM_VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kernel(version: str) -> VllmKernel:
    return VllmKernel(engine_source("vllm", version))


def both() -> tuple[VllmKernel, VllmKernel]:
    """The newest engine and the oldest."""
    return VllmKernel(engine_source("vllm", VLLM)), VllmKernel(engine_source("vllm", OLD))


class TestVllmKernel(KernelTestCase):
    """Results are checked by :func:`test_results_on_the_cpu` and on a GPU."""

    @pytest.fixture
    def make_kernel(self, version: str) -> Callable[[], VllmKernel]:
        return functools.partial(VllmKernel, engine_source("vllm", version))

    @pytest.fixture(params=COMPILED)
    def shapes(self, request: pytest.FixtureRequest) -> list[MoEShape]:
        return [COMPILED[request.param]]


def test_key_names_the_version(kernel: VllmKernel, version: str) -> None:
    assert kernel.key.name == "vllm"
    assert kernel.key.version == version


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(("case", "shared"), [("bf16", 24576), ("fp8 block", 12288), ("int4", 16384)])
def test_cross_compiles(kernel: VllmKernel, case: str, shared: int, capability: tuple[int, int]) -> None:
    if case == "fp8 block" and capability == (9, 0) and "SWAP_AB" in kernel.arg_names():
        shared = 18432
    check_compiles(kernel, COMPILED[case], capability, shared=shared)


def test_results_on_the_cpu(kernel: VllmKernel, version: str, tmp_path: Path) -> None:
    cases = CASES if version == VLLM else ("bf16", "fp8 block", "w4a16 group", "many experts")
    check_interpreted("vllm", kernel.source.path, cases, tmp_path)


def test_block_k_is_clamped_to_the_scales(kernel: VllmKernel) -> None:
    shape = MoEShape(32, 4, 256, 128, "fp8_w8a8", (64, 128))
    assert kernel.meta_launch(shape, "up", 16, CONFIG, (12, 0)).named()["BLOCK_SIZE_K"] == 64
    assert "launched as 64" in str(kernel.illegal_reason(CONFIG, shape, "up", GPUS[12, 0]))
    assert kernel.illegal_reason(CONFIG, BLOCK, "up", GPUS[12, 0]) is None


def test_few_tokens_launch_few_programs(kernel: VllmKernel) -> None:
    # 2 tokens are fewer than a tile's 32 rows: a tile for each of the 8 pairs, 4 tiles of columns.
    launch = kernel.meta_launch(BLOCK, "up", 2, CONFIG, (9, 0))
    assert launch.grid == (8 * 4,)
    assert launch.named()["EM"] == 8 * 32
    assert kernel.meta_launch(BLOCK, "up", 64, CONFIG, (9, 0)).named()["EM"] == 256 + 32 * 31


@pytest.mark.parametrize(("batch_size", "unsorted"), [(1, True), (2, True), (3, False)])
def test_sorting_is_left_out_as_served(batch_size: int, unsorted: bool) -> None:
    new, old = both()
    launch = new.meta_launch(BLOCK, "up", batch_size, CONFIG, (12, 0)).named()
    assert launch["naive_block_assignment"] is unsorted
    assert (launch["sorted_token_ids_ptr"] is None) is unsorted
    assert new.meta_launch(COMPILED["int4"], "up", 1, CONFIG, (12, 0)).named()["sorted_token_ids_ptr"] is not None
    ep = BLOCK.replace(ep_size=4)
    assert new.meta_launch(ep, "up", 1, CONFIG, (12, 0)).named()["naive_block_assignment"] is False
    assert old.meta_launch(BLOCK, "up", batch_size, CONFIG, (12, 0)).named()["sorted_token_ids_ptr"] is not None


@pytest.mark.parametrize(
    ("capability", "block_m", "swapped"), [((9, 0), 32, True), ((9, 0), 64, False), ((12, 0), 32, False)]
)
def test_operands_are_swapped_as_served(capability: tuple[int, int], block_m: int, swapped: bool) -> None:
    new, old = both()
    config = LaunchConfig(block_m, 64, 128, 8, 4, 3)
    assert new.meta_launch(BLOCK, "up", 16, config, capability).named()["SWAP_AB"] is swapped
    assert "SWAP_AB" not in old.meta_launch(BLOCK, "up", 16, config, capability).named()


def test_arguments_of_both_roles(kernel: VllmKernel, version: str) -> None:
    up, down = (kernel.meta_launch(BLOCK, role, 6, CONFIG, (12, 0)).named() for role in ("up", "down"))
    assert (up["N"], up["K"], up["top_k"], up["MUL_ROUTED_WEIGHT"]) == (256, 256, 4, False)
    assert (down["N"], down["K"], down["top_k"], down["MUL_ROUTED_WEIGHT"]) == (256, 128, 1, True)
    assert up["num_valid_tokens"] == down["num_valid_tokens"] == 24
    assert (up["SPLIT_K"], up["HAS_BIAS"]) == (1, False)
    # As launched by ``fused_experts_impl`` and by ``TritonExperts.apply``.
    assert (up["topk_weights_ptr"] is None) is (version != "0.11.2")
    assert down["topk_weights_ptr"] is not None


def test_grouped_weights_go_through_the_wna16_kernel(kernel: VllmKernel) -> None:
    # 4 tokens among 32 experts are so few that vLLM serves 4-bit weights with its CUDA kernel.
    launch = kernel.meta_launch(COMPILED["int4"], "up", 4, CONFIG, (12, 0))
    named = launch.named()
    assert (named["use_int4_w4a16"], named["has_zp"], named["group_size"], named["SPLIT_K"]) == (True, False, 64, 1)
    assert "fused_moe_kernel_gptq_awq" in launch.kernel.__name__


def test_tma_is_not_for_vllm(kernel: VllmKernel) -> None:
    tma = LaunchConfig(32, 64, 128, 8, 4, 3, use_tma=True)
    assert "no such key" in str(kernel.illegal_reason(tma, BLOCK, "down", GPUS[12, 0]))
    assert kernel.space_extras(BLOCK, GPUS[12, 0]) == ("maxnreg",)


def test_equal_specialisations_share_a_binary(kernel: VllmKernel) -> None:
    shape, sizes = COMPILED["bf16"], (1, 2, 4, 8, 96, 100)
    names = {m: kernel.specialisation(shape, "up", m) for m in sizes}
    hashes = {}
    with cross_target((12, 0)):
        for m in sizes:
            hashes[m] = kernel.meta_launch(shape, "up", m, CONFIG, (12, 0)).warmup().hash
    for one in sizes:
        for other in sizes:
            assert names[one] != names[other] or hashes[one] == hashes[other]
    assert len(set(names.values())) < len(sizes)


@pytest.mark.parametrize("batch_size", [1, 64])
def test_default_is_vllms(kernel: VllmKernel, batch_size: int) -> None:
    gpu = GpuSpec.by_name("H200")
    assert kernel.default_config(BLOCK, "up", batch_size, gpu).block_size_m == 16
    small = kernel.default_config(COMPILED["int4"], "up", batch_size, gpu)
    assert (small.block_size_n, small.block_size_k) == ((32, 64) if batch_size == 1 else (64, 32))
