"""Quantisation schemes: how weights and activations are stored, made at random, and read back.

Layouts are those that the engines use, so that every kernel runs on the same tensors:

====================  ==========================  ==============================================
scheme                weights                     scales
====================  ==========================  ==============================================
none                  [E, rows, K]                none
tensor                [E, rows, K]                weights [E], activations [1], float32
channel               [E, rows, K]                weights [E, rows, 1], 8-bit activations [tokens, 1], float32
block                 [E, rows, K]                weights [E, ceil(rows/bn), ceil(K/bk)], activations
                                                  [tokens, ceil(K/bk)], float32
group                 [E, rows, K/2] or           weights [E, rows, K/group] of the activations' dtype
                      [E, rows, K], uint8
====================  ==========================  ==============================================

Grouped 4-bit weights lie two to a byte along K, the even element in the low four bits, and stand
for ``nibble - 8``; grouped 8-bit weights stand for ``byte - 128``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moeopt.core.shape import MoEShape, Role

_TORCH: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
FP8_MAX: Final = 448.0
INT8_MAX: Final = 127.0
# Standard deviation of random quantised weights: wide enough that all codes occur, few are clipped.
_FP8_STD, _INT8_STD, _INT4_STD = 100.0, 36.0, 4.61
_CHUNK_ELEMENTS: Final = 1 << 27


@dataclass(frozen=True)
class Weights:
    """One role's expert weights.

    Attributes:
        q: [E, rows, K] as stored (see the module's table).
        scale: Scales, or None.
    """

    q: Tensor
    scale: Tensor | None


def compute_dtype(shape: MoEShape) -> torch.dtype:
    """dtype of the layer's outputs, and of its activations before they are quantised."""
    return torch.float16 if shape.spec.compute == "fp16" else torch.bfloat16


def weight_dtype(shape: MoEShape) -> torch.dtype:
    """dtype of the stored weights."""
    return torch.uint8 if shape.scales == "group" else _TORCH[shape.spec.weight]


def activation_dtype(shape: MoEShape) -> torch.dtype:
    """dtype of the activations that the kernel reads."""
    return _TORCH[shape.spec.compute]


def stored_reduction(shape: MoEShape, role: Role) -> int:
    """Elements of the last dimension of the stored weights: K, or K/2 where two lie in one."""
    k = shape.reduction(role)
    return k // 2 if shape.spec.weight_bits == 4 else k


def weight_scale_shape(shape: MoEShape, role: Role) -> tuple[int, ...] | None:
    """Shape of the weights' scales, or None."""
    scales = shape.scale_shape(role)
    return None if scales is None else (shape.num_experts, *scales)


def weight_scale_dtype(shape: MoEShape) -> torch.dtype:
    """dtype of the weights' scales."""
    return compute_dtype(shape) if shape.scales == "group" else torch.float32


def activation_scale_shape(shape: MoEShape, role: Role, tokens: int) -> tuple[int, ...] | None:
    """Shape of the scales of so many rows of activations, or None where they have 16 bits."""
    if shape.spec.activation_bits == 16:
        return None
    if shape.block_shape:
        return (tokens, math.ceil(shape.reduction(role) / shape.block_shape[1]))
    return (1,) if shape.scales == "tensor" else (tokens, 1)


def random_weights(shape: MoEShape, role: Role, *, device: torch.device, generator: torch.Generator) -> Weights:
    """Random weights whose dequantised standard deviation is about 1/sqrt(K), drawn on the device.

    The values are drawn as stored: nothing is quantised, and at most a few hundred MB are used beyond
    the result.
    """
    e, rows, k = shape.num_experts, shape.output_rows(role), shape.reduction(role)
    dtype = weight_dtype(shape)
    q = torch.empty((e, rows, stored_reduction(shape, role)), dtype=dtype, device=device)
    std = 1.0
    if shape.spec.weight_bits == 4:
        q.random_(0, 256, generator=generator)
        std = _INT4_STD
    elif dtype in (torch.bfloat16, torch.float16):
        q.normal_(0.0, k**-0.5, generator=generator)
    else:
        limit, std = (FP8_MAX, _FP8_STD) if dtype == torch.float8_e4m3fn else (INT8_MAX, _INT8_STD)
        offset = 128.0 if dtype == torch.uint8 else 0.0
        step = max(1, _CHUNK_ELEMENTS // (rows * k))
        for start in range(0, e, step):
            part = q[start : start + step]
            x = torch.empty(part.shape, dtype=torch.bfloat16, device=device)
            x.normal_(0.0, std, generator=generator).clamp_(-limit, limit)
            # bfloat16 holds the integers up to 256 exactly, so round, then shift, then cast.
            part.copy_(x if dtype == torch.float8_e4m3fn else x.round_().add_(offset))
    scale_shape = weight_scale_shape(shape, role)
    if scale_shape is None:
        return Weights(q, None)
    scale = torch.rand(scale_shape, dtype=torch.float32, device=device, generator=generator).add_(0.5)
    scale.mul_(k**-0.5 / std)
    return Weights(q, scale.to(weight_scale_dtype(shape)))


def quantise_activations(x: Tensor, shape: MoEShape) -> tuple[Tensor, Tensor | None]:
    """Activations as the kernel reads them.

    Args:
        x: [tokens, K] in :func:`compute_dtype`.
        shape: Says how.

    Returns:
        The stored activations [tokens, K] and their scales (see the module's table), or None.
    """
    dtype = activation_dtype(shape)
    if dtype not in (torch.float8_e4m3fn, torch.int8):
        return x, None
    limit = FP8_MAX if dtype == torch.float8_e4m3fn else INT8_MAX
    scales, values = shape.scales, x.float()
    tokens, k = x.shape
    if scales == "block":
        assert shape.block_shape is not None
        block = shape.block_shape[1]
        groups = math.ceil(k / block)
        padded = torch.nn.functional.pad(values, (0, groups * block - k)).view(tokens, groups, block)
        scale = padded.abs().amax(dim=2).clamp_min(1e-10) / limit
        values = (padded / scale[:, :, None]).view(tokens, groups * block)[:, :k]
    else:
        scale = values.abs().amax(dim=1, keepdim=True) if scales == "channel" else values.abs().max().view(1)
        scale = scale.clamp_min(1e-10) / limit
        values = values / scale
    values = values.clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype).contiguous(), scale.contiguous()


def dequantise_activations(a: Tensor, scale: Tensor | None, shape: MoEShape) -> Tensor:
    """Float32 values of stored activations [tokens, K]."""
    values = a.float()
    if scale is None:
        return values
    if shape.scales == "block":
        assert shape.block_shape is not None
        scale = scale.repeat_interleave(shape.block_shape[1], dim=1)[:, : a.shape[1]]
    return values * scale


def dequantise_expert(weights: Weights, expert: int, shape: MoEShape) -> Tensor:
    """Float32 values [rows, K] of one expert's weights."""
    q = weights.q[expert]
    if weights.scale is None:
        return q.float()
    scale = weights.scale[expert].float()
    if shape.scales == "group":
        assert shape.group_size is not None
        if shape.spec.weight_bits == 4:
            q = torch.stack((q & 0xF, q >> 4), dim=2).view(q.shape[0], -1)
            values = q.float() - 8.0
        else:
            values = q.float() - 128.0
        return values * scale.repeat_interleave(shape.group_size, dim=1)
    if shape.scales == "block":
        assert shape.block_shape is not None
        block_n, block_k = shape.block_shape
        scale = scale.repeat_interleave(block_n, dim=0)[: q.shape[0]]
        scale = scale.repeat_interleave(block_k, dim=1)[:, : q.shape[1]]
    return q.float() * scale
