"""Storage of weights and activations."""

from __future__ import annotations

import pytest
import torch

from moeopt.core.shape import ROLES, MoEShape
from moeopt.errors import InvalidInputError
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.quant import (
    compute_dtype,
    dequantise_activations,
    dequantise_expert,
    quantise_activations,
    weight_scale_shape,
)
from tests.kernels.schemes import SCHEMES, small_shape


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_have_the_engines_layout_and_sensible_values(scheme: str) -> None:
    shape = small_shape(scheme)
    layer = make_layer(shape, device="cpu", seed=3)
    for role in ROLES:
        weights = layer.weights(role)
        rows, k = shape.output_rows(role), shape.reduction(role)
        packed = 2 if shape.dtype == "int4_w4a16" else 1
        assert weights.q.shape == (5, rows, k // packed) and weights.q.is_contiguous()
        expected = weight_scale_shape(shape, role)
        assert (weights.scale is None) == (expected is None)
        if weights.scale is not None:
            assert weights.scale.shape == expected and weights.scale.is_contiguous()
            assert weights.scale.dtype == (torch.bfloat16 if shape.scales == "group" else torch.float32)
            assert weights.scale.unique().numel() > 1
        for expert in range(5):
            values = dequantise_expert(weights, expert, shape)
            assert values.shape == (rows, k) and bool(values.isfinite().all())
            # One scale for a whole expert is 0.5 to 1.5 times the usual one.
            assert 0.4 < float(values.std()) * k**0.5 < 1.7
            assert (values == 0).float().mean() < 0.1


def test_experts_differ_and_seeds_decide() -> None:
    shape = small_shape("fp8-block")
    first, again, other = (make_layer(shape, device="cpu", seed=s) for s in (1, 1, 2))
    assert torch.equal(first.up.q.view(torch.uint8), again.up.q.view(torch.uint8))
    assert not torch.equal(first.up.q.view(torch.uint8), other.up.q.view(torch.uint8))
    assert not torch.equal(first.up.q[0].view(torch.uint8), first.up.q[1].view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_activations_survive_quantisation(scheme: str) -> None:
    shape = small_shape(scheme, hidden_size=80)
    if shape.group_size:
        shape = small_shape(scheme)
    x = torch.randn((7, shape.hidden_size), generator=torch.Generator().manual_seed(0)).to(compute_dtype(shape))
    a, scale = quantise_activations(x, shape)
    back = dequantise_activations(a, scale, shape)
    error = float((back - x.float()).norm() / x.float().norm())
    assert error < (0.05 if scale is not None else 1e-9)


def test_int4_packs_the_even_element_low() -> None:
    shape = small_shape("int4-group-16")
    layer = make_layer(shape, device="cpu", seed=0)
    scale = layer.up.scale
    assert scale is not None
    values = dequantise_expert(layer.up, 2, shape)
    byte = int(layer.up.q[2, 3, 5])
    assert float(values[3, 10]) == pytest.approx(((byte & 15) - 8) * float(scale[2, 3, 0]))
    assert float(values[3, 11]) == pytest.approx(((byte >> 4) - 8) * float(scale[2, 3, 0]))


def test_block_scales_belong_to_their_block() -> None:
    shape = small_shape("fp8-narrow-block", hidden_size=72, intermediate_size=40)
    layer = make_layer(shape, device="cpu", seed=0)
    scale = layer.up.scale
    assert scale is not None and scale.shape == (5, 5, 3)
    values = dequantise_expert(layer.up, 1, shape)
    assert float(values[79, 71]) == pytest.approx(float(layer.up.q[1, 79, 71].float() * scale[1, 4, 2]))


def test_batches() -> None:
    shape = small_shape("fp8-channel")
    layer = make_layer(shape, device="cpu", seed=0)
    ids = torch.tensor([[0, 1], [4, -1], [2, 3]])
    up, down = (make_batch(layer, role, ids, seed=5) for role in ROLES)
    assert up.a.shape == (3, 96) and down.a.shape == (6, 64)
    assert up.a_scale is not None and up.a_scale.shape == (3, 1)
    assert up.num_tokens == 3 and up.num_pairs == 6 and up.topk_ids.dtype == torch.int32
    assert torch.allclose(up.topk_weights.sum(dim=1), torch.ones(3))
    assert torch.equal(up.a.view(torch.uint8), make_batch(layer, "up", ids, seed=5).a.view(torch.uint8))


@pytest.mark.parametrize("ids", [[[0, 5]], [[-2, 0]], [[0, 1, 2]], [0, 1]])
def test_ids_of_another_layer_are_refused(ids: list[object]) -> None:
    layer = make_layer(small_shape("bf16"), device="cpu", seed=0)
    with pytest.raises(InvalidInputError, match="topk_ids"):
        make_batch(layer, "up", torch.tensor(ids), seed=0)


def _likeness(device: str) -> float:
    """The greatest cosine between a token's activations and a row of weights, drawn with one seed."""
    shape = MoEShape(4, 2, 512, 256)
    layer = make_layer(shape, device=device, seed=0)
    # As many routed weights as a row has elements: were the generators alike, the first token would be the second row.
    batch = make_batch(layer, "up", torch.zeros((256, 2), dtype=torch.int32), seed=0)
    rows = torch.nn.functional.normalize(layer.up.q.flatten(0, 1).float(), dim=1)
    return float((torch.nn.functional.normalize(batch.a.float(), dim=1) @ rows.T).abs().max())


def test_activations_are_not_rows_of_weights() -> None:
    assert _likeness("cpu") < 0.3


@pytest.mark.gpu
def test_activations_are_not_rows_of_weights_on_a_gpu() -> None:
    assert _likeness("cuda:0") < 0.3
