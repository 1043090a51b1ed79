"""The reference, and what counts as wrong."""

from __future__ import annotations

import math

import pytest
import torch

from moeopt.core.shape import ROLES, Role
from moeopt.core.trial import MAX_RELATIVE_ERROR
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.quant import dequantise_activations, dequantise_expert
from moeopt.kernels.reference import reference, relative_error
from tests.kernels.schemes import SCHEMES, small_shape

IDS = torch.tensor([[0, 1], [3, 3], [4, -1], [-1, -1]])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_reference_is_the_product_of_each_pair(scheme: str, role: Role) -> None:
    shape = small_shape(scheme)
    layer = make_layer(shape, device="cpu", seed=0)
    batch = make_batch(layer, role, IDS, seed=1)
    out = reference(layer, role, batch, dtype=torch.float64)
    a = dequantise_activations(batch.a, batch.a_scale, shape).double()
    for pair, expert in enumerate(IDS.flatten().tolist()):
        if expert < 0:
            assert bool((out[pair] == 0).all())
            continue
        row = a[pair // 2 if role == "up" else pair]
        expected = dequantise_expert(layer.weights(role), expert, shape).double() @ row
        if role == "down":
            expected = expected * batch.topk_weights.flatten()[pair]
        assert torch.allclose(out[pair], expected.float(), rtol=1e-5, atol=1e-6)
    assert relative_error(reference(layer, role, batch), out) < 1e-5


def test_error_is_relative() -> None:
    ref = torch.randn((50, 64), generator=torch.Generator().manual_seed(0))
    assert relative_error(ref, ref) == 0.0
    assert relative_error(ref * 1.02, ref) == pytest.approx(0.02, rel=1e-3)
    assert relative_error(ref.bfloat16(), ref) < 0.003


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_an_infinite_error(value: float) -> None:
    ref = torch.ones((3, 4))
    out = ref.clone()
    out[1, 2] = value
    assert relative_error(out, ref) == math.inf


def test_bad_values_in_rows_of_zeros_count_too() -> None:
    ref = torch.ones((3, 4))
    ref[2] = 0
    out = ref.clone()
    assert relative_error(out, ref) == 0.0
    for value in (1e-3, math.nan):
        out[2, 0] = value
        assert relative_error(out, ref) == math.inf
    assert relative_error(torch.full((2, 2), math.nan), torch.zeros((2, 2))) == math.inf
    assert relative_error(torch.zeros((2, 2)), torch.zeros((2, 2))) == 0.0


def test_one_wrong_row_among_many_is_found() -> None:
    ref = torch.randn((40_000, 8), generator=torch.Generator().manual_seed(0))
    out = ref.clone()
    out[12_345] = ref[12_346]
    whole = float((out - ref).norm() / ref.norm())
    assert whole < MAX_RELATIVE_ERROR < relative_error(out, ref)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.zeros((2, 3)), torch.zeros((3, 2)))
