"""The builtin kernel's results, through Triton's interpreter on the CPU and on a GPU where there is one."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.space import SearchSpace
from moeopt.core.trial import MAX_RELATIVE_ERROR
from moeopt.errors import UnsupportedShapeError
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.kernels.builtin_launch import launch, options_for
from moeopt.kernels.layer import Layer, make_batch, make_layer
from moeopt.kernels.quant import compute_dtype
from moeopt.kernels.reference import reference, relative_error
from moeopt.testing.suites import KernelTestCase
from tests.kernels.schemes import SCHEMES, small_shape

H200, RTX = GpuSpec.by_name("H200"), GpuSpec.by_name("RTX 5090")
# Repeated experts, an expert without tokens (2), pairs without an expert here.
IDS = torch.tensor([[0, 1], [3, 3], [4, -1], [-1, -1], [1, 0], [0, 4]])
TILE = LaunchConfig(16, 32, 32, 2, 4, 3)


def error_of(layer: Layer, role: Role, ids: torch.Tensor, config: LaunchConfig, **options: Any) -> float:
    """Runs on a poisoned output."""
    batch = make_batch(layer, role, ids, seed=1)
    out = torch.full(
        (batch.num_pairs, layer.shape.output_rows(role)),
        math.nan,
        dtype=compute_dtype(layer.shape),
        device=layer.device,
    )
    if options:
        launch(layer, role, batch, config, out, {**options_for(layer.shape, role, config, None), **options})()
    else:
        BuiltinKernel().bind(layer, role, batch, config, out)()
    return relative_error(out, reference(layer, role, batch))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_matches_the_reference(scheme: str, role: Role) -> None:
    """Every scheme, both roles, K of three steps, all rows in whole tiles."""
    shape = small_shape(scheme)
    layer = make_layer(shape, device="cpu", seed=0)
    assert error_of(layer, role, IDS, TILE) < MAX_RELATIVE_ERROR


class TestBuiltinKernel(KernelTestCase):
    """Every scheme on the CPU: K of three steps, all rows in whole tiles."""

    @pytest.fixture
    def make_kernel(self) -> type[BuiltinKernel]:
        return BuiltinKernel

    @pytest.fixture(params=[*SCHEMES, "expert parallel"])
    def shapes(self, request: pytest.FixtureRequest) -> list[MoEShape]:
        if request.param == "expert parallel":
            return [small_shape("fp8-channel", ep_size=2)]
        # The engine's default for int8 steps through K by 64, whatever the blocks are.
        return [small_shape(request.param, **({"block_shape": (64, 64)} if request.param == "int8-block" else {}))]

    @pytest.fixture
    def configs(self) -> list[LaunchConfig]:
        return [TILE]

    @pytest.fixture
    def gpu(self) -> GpuSpec:
        return H200

    @pytest.fixture
    def device(self) -> str:
        return "cpu"


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if not s.endswith("-block")])
def test_uneven_sizes(scheme: str, role: Role) -> None:
    """BLOCK_SIZE_K divides neither K, BLOCK_SIZE_N not the rows, and tiles of rows are not full."""
    shape = small_shape(scheme)
    layer = make_layer(shape, device="cpu", seed=0)
    assert error_of(layer, role, IDS, LaunchConfig(16, 128, 64, 1, 4, 3)) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-narrow-block", "int8-block"])
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_block_scales_of_part_blocks(scheme: str, role: Role, block_n: int) -> None:
    """Neither the rows nor K are whole scale blocks; tiles are narrower and wider than a block."""
    shape = small_shape(scheme, hidden_size=80, intermediate_size=72)
    layer = make_layer(shape, device="cpu", seed=0)
    assert error_of(layer, role, IDS, LaunchConfig(16, block_n, 32, 2, 4, 3)) < MAX_RELATIVE_ERROR


def test_block_of_a_size_that_is_no_power_of_two() -> None:
    shape = small_shape("fp8-block", hidden_size=96, intermediate_size=96, block_shape=(24, 96))
    layer = make_layer(shape, device="cpu", seed=0)
    for role in ROLES:
        assert error_of(layer, role, IDS, TILE) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", ["fp8-tensor", "fp8-channel", "fp8-block", "fp8-narrow-block"])
def test_swapped_operands_give_the_same(scheme: str, role: Role) -> None:
    """What runs on compute capability 9 with few rows."""
    shape = small_shape(scheme, intermediate_size=48)
    layer = make_layer(shape, device="cpu", seed=0)
    assert error_of(layer, role, IDS, LaunchConfig(16, 64, 32, 2, 4, 3), SWAP_AB=True) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("top_k", [1, 3, 22])
@pytest.mark.parametrize("role", ROLES)
def test_experts_per_token(top_k: int, role: Role) -> None:
    shape = MoEShape(24, top_k, 32, 32)
    layer = make_layer(shape, device="cpu", seed=0)
    ids = torch.stack([torch.randperm(24, generator=torch.Generator().manual_seed(i))[:top_k] for i in range(3)])
    assert error_of(layer, role, ids, TILE) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("ids", [[[2, 2]] * 40, [[-1, -1]] * 3, [[4, 0]]])
@pytest.mark.parametrize("role", ROLES)
def test_lopsided_routing(ids: list[list[int]], role: Role) -> None:
    """One expert takes all, nobody comes, a single token."""
    layer = make_layer(small_shape("bf16"), device="cpu", seed=0)
    assert error_of(layer, role, torch.tensor(ids), TILE) < MAX_RELATIVE_ERROR


def test_down_applies_the_routed_weight_and_up_does_not() -> None:
    layer = make_layer(small_shape("bf16"), device="cpu", seed=0)
    for role, changes in (("up", False), ("down", True)):
        error = error_of(layer, role, IDS, TILE, ROUTED_WEIGHT=not changes)  # type: ignore[arg-type]
        assert error > MAX_RELATIVE_ERROR


def test_ungated_and_grouped_tiles() -> None:
    shape = small_shape("bf16", gated=False, intermediate_size=80)
    layer = make_layer(shape, device="cpu", seed=0)
    for group in (1, 3, 64):
        assert error_of(layer, "up", IDS, LaunchConfig(16, 32, 32, group, 4, 3)) < MAX_RELATIVE_ERROR


def test_a_wrong_scale_is_noticed() -> None:
    layer = make_layer(small_shape("int4-group-32"), device="cpu", seed=0)
    batch = make_batch(layer, "up", IDS, seed=1)
    expected = reference(layer, "up", batch)
    out = torch.empty(expected.shape, dtype=torch.bfloat16)
    run = BuiltinKernel().bind(layer, "up", batch, TILE, out)
    run()
    assert relative_error(out, expected) < MAX_RELATIVE_ERROR
    assert layer.up.scale is not None
    layer.up.scale[0, :, 1] *= 1.5
    run()
    assert relative_error(out, expected) > MAX_RELATIVE_ERROR


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), scheme=st.sampled_from(sorted(SCHEMES)), role=st.sampled_from(ROLES))
def test_any_shape(data: st.DataObject, scheme: str, role: Role) -> None:
    def number(name: str, low: int, high: int) -> int:
        return data.draw(st.integers(low, high), label=name)

    step = {"int4-group-16": 16, "int4-group-32": 32, "int8-weights-group": 32}.get(scheme, 1)
    experts = number("experts", 1, 6)
    top_k = number("top_k", 1, experts)
    shape = small_shape(
        scheme,
        num_experts=experts,
        top_k=top_k,
        hidden_size=step * number("hidden", 1, 80 // step),
        intermediate_size=step * number("intermediate", 1, 80 // step),
        gated=data.draw(st.booleans(), label="gated"),
    )
    block_k = 32 if shape.block_shape else data.draw(st.sampled_from([32, 64]), label="block_k")
    config = LaunchConfig(16, data.draw(st.sampled_from([16, 32, 64]), label="block_n"), block_k, 2, 4, 2)
    tokens = number("tokens", 1, 9)
    flat = data.draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k))
    layer = make_layer(shape, device="cpu", seed=number("seed", 0, 9))
    assert error_of(layer, role, torch.tensor(flat).view(tokens, top_k), config) < MAX_RELATIVE_ERROR


def test_operands_that_do_not_belong_together_are_refused() -> None:
    layer = make_layer(small_shape("bf16"), device="cpu", seed=0)
    batch = make_batch(layer, "up", IDS, seed=1)
    with pytest.raises(ValueError, match="role"):
        BuiltinKernel().bind(layer, "down", batch, TILE, torch.empty((12, 96)))
    with pytest.raises(ValueError, match="out has shape"):
        BuiltinKernel().bind(layer, "up", batch, TILE, torch.empty((12, 64)))


def test_check_refuses_what_cannot_run() -> None:
    kernel = BuiltinKernel()
    kernel.check(small_shape("fp8-block"), H200)
    with pytest.raises(UnsupportedShapeError, match="fp8 tensor cores"):
        kernel.check(small_shape("fp8-block"), GpuSpec.by_name("A100"))
    with pytest.raises(UnsupportedShapeError, match="does not divide"):
        kernel.check(small_shape("int4-group-32", intermediate_size=48), H200)
    with pytest.raises(UnsupportedShapeError, match="group_size is 48"):
        kernel.check(small_shape("int4-group-32", group_size=48, intermediate_size=48), H200)
    with pytest.raises(UnsupportedShapeError, match="at most"):
        kernel.check(MoEShape(1, 1, 65536, 32768), H200)


@pytest.mark.parametrize(
    ("scheme", "config", "word"),
    [
        ("bf16", LaunchConfig(256, 256, 256, 1, 8, 5), "shared memory"),
        ("bf16", LaunchConfig(16, 32, 64, 1, 4, 3, use_tma=True), "USE_TMA"),
        ("bf16", LaunchConfig(8, 32, 64, 1, 4, 3), "BLOCK_SIZE_M"),
        ("bf16", LaunchConfig(16, 48, 64, 1, 4, 3), "BLOCK_SIZE_N"),
        ("bf16", LaunchConfig(16, 32, 64, 1, 3, 3), "num_warps"),
        ("int8-tensor", LaunchConfig(16, 32, 16, 1, 4, 3), "8-bit tensor cores"),
        ("fp8-block", LaunchConfig(16, 32, 64, 1, 4, 3), "block_k"),
        ("int8-weights", LaunchConfig(128, 256, 64, 1, 8, 7), "245,760 bytes"),
    ],
)
def test_illegal_configs_have_a_reason(scheme: str, config: LaunchConfig, word: str) -> None:
    kernel, shape = BuiltinKernel(), small_shape(scheme)
    assert word in (kernel.illegal_reason(config, shape, "up", H200) or "")
    assert kernel.illegal_reason(TILE, shape, "up", H200) is None


def test_the_limits_leave_of_the_grid_what_fits() -> None:
    """The numbers of the grid's configs that fit 101,376 bytes of shared memory on compute capability 12."""
    kernel = BuiltinKernel()
    for shape, count in (
        (MoEShape(256, 8, 3072, 256), 976),
        (MoEShape(256, 8, 3072, 256, dtype="fp8_w8a8"), 1456),
        (MoEShape(256, 8, 6144, 256, dtype="fp8_w8a8", block_shape=(128, 128)), 1128),
    ):
        configs = SearchSpace.grid(shape).configs()
        assert sum(kernel.illegal_reason(c, shape, "up", RTX) is None for c in configs) == count


def test_kernel_travels_and_names_itself() -> None:
    kernel = pickle.loads(pickle.dumps(BuiltinKernel()))
    assert kernel.key == BuiltinKernel().key
    assert kernel.key.name == "builtin" and len(kernel.key.source_hash) == 16
    shape = small_shape("bf16")
    assert kernel.default_config(shape, "up", 1, H200) == LaunchConfig(16, 32, 64, 1, 4, 3)
    assert kernel.specialisation(shape, "up", 1) == kernel.specialisation(shape, "up", 4096)
    assert kernel.specialisation(shape, "up", 1) != kernel.specialisation(shape, "down", 1)
    assert kernel.space_extras(shape, H200) == ("maxnreg",)


def test_operands_are_swapped_where_the_weights_fill_more_rows() -> None:
    few, many = LaunchConfig(16, 64, 32, 1, 4, 3), LaunchConfig(64, 64, 32, 1, 4, 3)
    fp8 = small_shape("fp8-block")

    def swaps_operands(shape: MoEShape, config: LaunchConfig, capability: tuple[int, int] | None) -> bool:
        swaps = options_for(shape, "up", config, capability)["SWAP_AB"]
        assert isinstance(swaps, bool)  # a constant of the binary, and part of its name
        return swaps

    assert swaps_operands(fp8, few, (9, 0))
    assert not swaps_operands(fp8, many, (9, 0))
    assert not swaps_operands(fp8, few, (12, 0)) and not swaps_operands(fp8, few, None)
    assert not swaps_operands(small_shape("bf16"), few, (9, 0))
    assert not swaps_operands(fp8, LaunchConfig(16, 32, 32, 1, 4, 3), (9, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_gpu_matches_the_reference(scheme: str, role: Role) -> None:
    changes: dict[str, Any] = {"num_experts": 64, "top_k": 6, "hidden_size": 2048, "intermediate_size": 768}
    if SCHEMES[scheme].get("block_shape"):
        changes["block_shape"] = (128, 128)
    layer = make_layer(small_shape(scheme, **changes), device="cuda", seed=0)
    for tokens, config in ((3, LaunchConfig(16, 64, 64, 1, 4, 3)), (700, LaunchConfig(64, 128, 64, 8, 4, 3))):
        ids = torch.rand((tokens, 64)).argsort(dim=1)[:, :6]
        ids[0, 0] = -1
        assert error_of(layer, role, ids, config) < MAX_RELATIVE_ERROR
