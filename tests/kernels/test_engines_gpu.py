"""The engines' kernels on a GPU. Those that are here run: installed, or named by their variable."""

from __future__ import annotations

import pytest
import torch

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.trial import MAX_RELATIVE_ERROR
from moeopt.kernels import get_kernel
from moeopt.kernels.engine import EngineKernel
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.reference import poison, reference, relative_error
from moeopt.kernels.target import cross_target

pytestmark = pytest.mark.gpu
E, TOP_K, K, N = 64, 8, 1024, 512
SHAPES = {
    "bf16": MoEShape(E, TOP_K, K, N),
    "fp16": MoEShape(E, TOP_K, K, N, "fp16"),
    "fp8 tensor": MoEShape(E, TOP_K, K, N, "fp8_w8a8"),
    "fp8 channel": MoEShape(E, TOP_K, K, N, "fp8_w8a8", per_channel=True),
    "fp8 block": MoEShape(E, TOP_K, K, N, "fp8_w8a8", (128, 128)),
    "int8 channel": MoEShape(E, TOP_K, K, N, "int8_w8a8", per_channel=True),
    "int8 block": MoEShape(E, TOP_K, K, N, "int8_w8a8", (128, 128)),
    "w8a16 channel": MoEShape(E, TOP_K, K, N, "int8_w8a16"),
    "w8a16 group": MoEShape(E, TOP_K, K, N, "int8_w8a16", group_size=128),
    "w4a16 group": MoEShape(E, TOP_K, K, N, "int4_w4a16", group_size=128),
    "expert parallel": MoEShape(E, TOP_K, K, N, ep_size=2),
    "odd sizes": MoEShape(60, 4, 1056, 176),
}
# Fewer rows than wgmma's 64 and not, both numbers of warps.
CONFIGS = (LaunchConfig(16, 64, 64, 1, 4, 3), LaunchConfig(64, 128, 64, 8, 8, 2), LaunchConfig(32, 64, 128, 4, 4, 2))


@pytest.fixture(params=sorted(engines.names()))
def kernel(request: pytest.FixtureRequest) -> EngineKernel:
    if get_kernel("auto", engine=request.param).key.name != request.param:
        pytest.skip(f"{request.param} is not here: install it or set {engines.get(request.param).kernel.variable}")
    found = get_kernel(request.param)
    assert isinstance(found, EngineKernel)
    return found


def routed(shape: MoEShape, tokens: int) -> torch.Tensor:
    """Distinct experts for each token; those of other ranks are -1."""
    generator = torch.Generator().manual_seed(tokens)
    experts = shape.num_experts * shape.ep_size
    ids = torch.rand((tokens, experts), generator=generator).topk(shape.top_k).indices
    return torch.where(ids < shape.num_experts, ids, -1)


@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(kernel: EngineKernel, name: str, tokens: int) -> None:
    shape, gpu = SHAPES[name], GpuSpec.detect()
    kernel.check(shape, gpu)
    layer = make_layer(shape, device="cuda:0", seed=1)
    for role in ROLES:
        batch = make_batch(layer, role, routed(shape, tokens), seed=2)
        expected = reference(layer, role, batch)
        ran = 0
        for config in CONFIGS:
            variants = [config]
            if kernel.can_use_tma(shape, role):
                variants.append(LaunchConfig.from_dict({**config.to_dict(), "USE_TMA": True}))
            for variant in variants:
                if kernel.illegal_reason(variant, shape, role, gpu):
                    continue
                out = torch.empty_like(expected, dtype=torch.float16 if name == "fp16" else torch.bfloat16)
                poison(out, batch, skips_remote_experts=kernel.skips_remote_experts(shape))
                kernel.bind(layer, role, batch, variant, out)()
                assert relative_error(out, expected) < MAX_RELATIVE_ERROR, (role, variant)
                ran += 1
        assert ran


@pytest.mark.parametrize("name", ["bf16", "fp8 block", "w4a16 group"])
def test_in_a_cuda_graph(kernel: EngineKernel, name: str) -> None:
    shape, config = SHAPES[name], CONFIGS[0]
    layer = make_layer(shape, device="cuda:0", seed=1)
    for role in ROLES:
        batch = make_batch(layer, role, routed(shape, 16), seed=2)
        expected = reference(layer, role, batch)
        out = torch.full_like(expected, float("nan"), dtype=torch.bfloat16)
        launch = kernel.bind(layer, role, batch, config, out)
        launch()
        torch.cuda.synchronize()
        out.fill_(float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                launch()
        assert bool(out.isnan().all())
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, expected) < MAX_RELATIVE_ERROR


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("name", ["bf16", "fp8 block", "w4a16 group"])
def test_launch_finds_what_was_compiled_ahead(
    kernel: EngineKernel, name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    shape, config = SHAPES[name], CONFIGS[2]
    misses: list[object] = []
    layer = make_layer(shape, device="cuda:0", seed=1)
    for role in ROLES:
        with cross_target(GpuSpec.detect().compute_capability):
            kernel.compile(shape, role, tokens, config)
        batch = make_batch(layer, role, routed(shape, tokens), seed=2)
        out = torch.empty((batch.num_pairs, shape.output_rows(role)), dtype=torch.bfloat16, device="cuda:0")
        monkeypatch.setattr(
            triton.knobs.compilation,
            "listener",
            lambda *, cache_hit, **_: misses.append(None) if not cache_hit else None,
        )
        kernel.bind(layer, role, batch, config, out)()
        monkeypatch.undo()
    assert not misses
