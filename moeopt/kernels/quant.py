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
from typing import Final, Literal

import torch
from torch import Tensor

from moeopt.core.shape import DTYPES, MoEShape, Role

Scheme = Literal["none", "tensor", "channel", "block", "group"]

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


def scheme_of(shape: MoEShape) -> Scheme:
    """Which scales the shape has. 8-bit weights with 16-bit activations have one per channel or per group."""
    if shape.group_size:
        return "group"
    if shape.block_shape:
        return "block"
    if shape.per_channel or shape.dtype == "int8_w8a16":
        return "channel"
    return "tensor" if DTYPES[shape.dtype].weight_bits == 8 else "none"


def compute_dtype(shape: MoEShape) -> torch.dtype:
    """dtype of the layer's outputs, and of its activations before they are quantised."""
    return torch.float16 if shape.dtype == "fp16" else torch.bfloat16


def weight_dtype(shape: MoEShape) -> torch.dtype:
    """dtype of the stored weights."""
    if scheme_of(shape) == "group":
        return torch.uint8
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(
        DTYPES[shape.dtype].compute, torch.int8 if shape.dtype == "int8_w8a16" else compute_dtype(shape)
    )


def activation_dtype(shape: MoEShape) -> torch.dtype:
    """dtype of the activations that the kernel reads."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(DTYPES[shape.dtype].compute, compute_dtype(shape))


def stored_reduction(shape: MoEShape, role: Role) -> int:
    """Elements of the last dimension of the stored weights: K, or K/2 where two lie in one."""
    k = shape.reduction(role)
    return k // 2 if DTYPES[shape.dtype].weight_bits == 4 else k


def weight_scale_shape(shape: MoEShape, role: Role) -> tuple[int, ...] | None:
    """Shape of the weights' scales, or None."""
    e, rows, k = shape.num_experts, shape.output_rows(role), shape.reduction(role)
    scheme = scheme_of(shape)
    if scheme == "tensor":
        return (e,)
    if scheme == "channel":
        return (e, rows, 1)
    if scheme == "block":
        assert shape.block_shape is not None
        return (e, math.ceil(rows / shape.block_shape[0]), math.ceil(k / shape.block_shape[1]))
    if scheme == "group":
        assert shape.group_size is not None
        return (e, rows, k // shape.group_size)
    return None


def random_weights(shape: MoEShape, role: Role, *, device: torch.device, generator: torch.Generator) -> Weights:
    """Random weights whose dequantised standard deviation is about 1/sqrt(K), drawn on the device.

    The values are drawn as stored: nothing is quantised, and at most a few hundred MB are used beyond
    the result.
    """
    e, rows, k = shape.num_experts, shape.output_rows(role), shape.reduction(role)
    dtype = weight_dtype(shape)
    q = torch.empty((e, rows, stored_reduction(shape, role)), dtype=dtype, device=device)
    std = 1.0
    if DTYPES[shape.dtype].weight_bits == 4:
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
    return Weights(q, scale.to(compute_dtype(shape)) if scheme_of(shape) == "group" else scale)


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
    scheme, values = scheme_of(shape), x.float()
    tokens, k = x.shape
    if scheme == "block":
        assert shape.block_shape is not None
        block = shape.block_shape[1]
        groups = math.ceil(k / block)
        padded = torch.nn.functional.pad(values, (0, groups * block - k)).view(tokens, groups, block)
        scale = padded.abs().amax(dim=2).clamp_min(1e-10) / limit
        values = (padded / scale[:, :, None]).view(tokens, groups * block)[:, :k]
    else:
        scale = values.abs().amax(dim=1, keepdim=True) if scheme == "channel" else values.abs().max().view(1)
        scale = scale.clamp_min(1e-10) / limit
        values = values / scale
    values = values.clamp(-limit, limit)
    return (values.round() if dtype == torch.int8 else values).to(dtype).contiguous(), scale.contiguous()


def dequantise_activations(a: Tensor, scale: Tensor | None, shape: MoEShape) -> Tensor:
    """Float32 values of stored activations [tokens, K]."""
    values = a.float()
    if scale is None:
        return values
    if scheme_of(shape) == "block":
        assert shape.block_shape is not None
        scale = scale.repeat_interleave(shape.block_shape[1], dim=1)[:, : a.shape[1]]
    return values * scale


def dequantise_expert(weights: Weights, expert: int, shape: MoEShape) -> Tensor:
    """Float32 values [rows, K] of one expert's weights."""
    q = weights.q[expert]
    if weights.scale is None:
        return q.float()
    scheme, scale = scheme_of(shape), weights.scale[expert].float()
    if scheme == "group":
        assert shape.group_size is not None
        if DTYPES[shape.dtype].weight_bits == 4:
            q = torch.stack((q & 0xF, q >> 4), dim=2).view(q.shape[0], -1)
            values = q.float() - 8.0
        else:
            values = q.float() - 128.0
        return values * scale.repeat_interleave(shape.group_size, dim=1)
    if scheme == "block":
        assert shape.block_shape is not None
        block_n, block_k = shape.block_shape
        scale = scale.repeat_interleave(block_n, dim=0)[: q.shape[0]]
        scale = scale.repeat_interleave(block_k, dim=1)[:, : q.shape[1]]
    return q.float() * scale
