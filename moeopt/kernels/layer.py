"""The operands of a launch: one layer's expert weights, and routed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.errors import InvalidInputError
from moeopt.kernels.quant import Weights, compute_dtype, quantise_activations, random_weights

# Mixed into the seeds of activations: a generator that starts like that of the weights would draw rows of weights
# as activations. Their sums grow so long that the short accumulators of Hopper's fp8 tensor cores lose several
# percent, and right configs are taken for wrong ones.
_ACTIVATIONS: Final = 0x9E3779B9


@dataclass(frozen=True)
class Layer:
    """Weights and scales of one MoE layer on a torch device (layouts: :mod:`moeopt.kernels.quant`).

    Attributes:
        shape: The layer.
        up: W1, [E, 2N, K] (N rows if not gated).
        down: W2, [E, K, N].
    """

    shape: MoEShape
    up: Weights
    down: Weights

    def weights(self, role: Role) -> Weights:
        """The weights that one role reads."""
        return self.up if role == "up" else self.down

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.up.q.device

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and scales."""
        return sum(t.nbytes for w in (self.up, self.down) for t in (w.q, w.scale) if t is not None)


@dataclass(frozen=True)
class RoutedBatch:
    """Tokens, the experts they visit, and one role's activations.

    Attributes:
        role: Which projection the activations are for.
        topk_ids: [M, top_k] int32; -1 stands for an expert on another GPU.
        topk_weights: [M, top_k] float32, each row sums to 1; ``down`` multiplies by them.
        a: Activations as stored: [M, K] for up, [M * top_k, N] for down.
        a_scale: Scales of the activations, or None.
    """

    role: Role
    topk_ids: Tensor
    topk_weights: Tensor
    a: Tensor
    a_scale: Tensor | None

    @property
    def num_tokens(self) -> int:
        """M."""
        return int(self.topk_ids.shape[0])

    @property
    def num_pairs(self) -> int:
        """Rows of the output: M * top_k."""
        return int(self.topk_ids.numel())


def make_layer(shape: MoEShape, *, device: torch.device | str, seed: int) -> Layer:
    """A layer with random weights, never zeros, drawn on the device.

    Args:
        shape: The layer.
        device: ``cuda:0``, ``cpu``, ...
        seed: The same seed on the same device gives the same weights.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    up, down = (random_weights(shape, role, device=device, generator=generator) for role in ROLES)
    return Layer(shape, up, down)


def make_batch(layer: Layer, role: Role, topk_ids: Tensor, *, seed: int) -> RoutedBatch:
    """Random activations and routed weights for these tokens.

    Args:
        layer: The layer, on the device where the batch is wanted.
        role: Which projection.
        topk_ids: [M, top_k] integers, -1 for experts on another GPU.
        seed: The same seed on the same device gives the same values.

    Raises:
        InvalidInputError: The ids are not of this layer.
    """
    shape, device = layer.shape, layer.device
    if topk_ids.ndim != 2 or topk_ids.shape[1] != shape.top_k or topk_ids.shape[0] < 1:
        raise InvalidInputError(f"topk_ids has shape {tuple(topk_ids.shape)}: expected (tokens, {shape.top_k})")
    if int(topk_ids.min()) < -1 or int(topk_ids.max()) >= shape.num_experts:
        raise InvalidInputError(
            f"topk_ids range from {int(topk_ids.min())} to {int(topk_ids.max())}: "
            f"expected -1 to {shape.num_experts - 1}"
        )
    generator = torch.Generator(device).manual_seed(seed ^ _ACTIVATIONS)
    ids = topk_ids.to(device=device, dtype=torch.int32).contiguous()
    logits = torch.randn(ids.shape, dtype=torch.float32, device=device, generator=generator)
    tokens = ids.shape[0] if role == "up" else ids.numel()
    x = torch.randn((tokens, shape.reduction(role)), dtype=torch.float32, device=device, generator=generator).to(
        compute_dtype(shape)
    )
    a, a_scale = quantise_activations(x, shape)
    return RoutedBatch(role, ids, torch.softmax(logits, dim=1), a, a_scale)
