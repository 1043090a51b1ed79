"""Float32 reference of a launch, and how far off a kernel is."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from moeopt.core.shape import Role
from moeopt.kernels.layer import Layer, RoutedBatch
from moeopt.kernels.quant import dequantise_activations, dequantise_expert

_ROWS_AT_ONCE: Final = 1 << 14


def reference(layer: Layer, role: Role, batch: RoutedBatch, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact product of the stored operands, expert by expert.

    Args:
        layer: Weights and scales.
        role: Which projection.
        batch: Routed tokens; for down, the result is multiplied by the routed weights.
        dtype: float32 or float64, in which everything is computed.

    Returns:
        [M * top_k, rows] float32. Pairs of experts on another GPU have rows of zeros.
    """
    shape, weights = layer.shape, layer.weights(role)
    out = torch.zeros((batch.num_pairs, shape.output_rows(role)), dtype=torch.float32, device=layer.device)
    ids, pairs = torch.sort(batch.topk_ids.flatten(), stable=True)
    experts, counts = torch.unique_consecutive(ids, return_counts=True)
    start = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        run = pairs[start : start + count]
        start += count
        if expert < 0:
            continue
        w = dequantise_expert(weights, expert, shape).to(dtype)
        for first in range(0, count, _ROWS_AT_ONCE):
            rows = run[first : first + _ROWS_AT_ONCE]
            source = rows // shape.top_k if role == "up" else rows
            scale = batch.a_scale
            if scale is not None and scale.ndim == 2:
                scale = scale[source]
            product = dequantise_activations(batch.a[source], scale, shape).to(dtype) @ w.T
            if role == "down":
                product *= batch.topk_weights.flatten()[rows, None]
            out[rows] = product.float()
    return out


def poison(out: Tensor, batch: RoutedBatch, *, skips_remote_experts: bool = False) -> None:
    """Fills an output with NaN, so that a row that is not written is wrong.

    Args:
        out: [M * top_k, rows].
        batch: The tokens that the launch is for.
        skips_remote_experts: Whether the kernel leaves out pairs of experts on another GPU
            (:meth:`moeopt.kernels.base.MoEKernel.skips_remote_experts`): their rows get zeros, and have to keep them.
    """
    out.fill_(float("nan"))
    if skips_remote_experts:
        out[batch.topk_ids.flatten() < 0] = 0.0


def relative_error(out: Tensor, ref: Tensor) -> float:
    """How far an output is from the reference: 0 is exact, over :data:`~moeopt.core.trial.MAX_RELATIVE_ERROR` is wrong.

    The relative Frobenius error of the whole, or a tenth of the worst row's if that is greater: one
    wrong row among many would vanish in the whole.

    Returns:
        Infinity where a value is NaN or infinite, or where a row that should be zero is not.
    """
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, the reference {tuple(ref.shape)}")
    wrong, right = (torch.zeros(ref.shape[0], dtype=torch.float64, device=ref.device) for _ in range(2))
    for start in range(0, ref.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        wrong[part] = torch.linalg.vector_norm(out[part].float() - ref[part], dim=1).double()
        right[part] = torch.linalg.vector_norm(ref[part], dim=1).double()
    rows = torch.where(wrong == 0, 0.0, wrong / right)
    total = wrong.norm() / right.norm() if bool((right > 0).any()) else rows.max()
    worst = float(torch.maximum(total, rows.max() / 10))
    return worst if worst == worst else float("inf")
