"""Compiling and launching the builtin kernel.

On CPU tensors it runs through Triton's interpreter: slow, and exact enough to check results with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeopt.core.architecture import architecture_of
from moeopt.core.code_path import code_path
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Resources
from moeopt.kernels import builtin_kernel
from moeopt.kernels.align import align, kept_with, max_tiles
from moeopt.kernels.builtin_cpu import CpuKernel
from moeopt.kernels.layer import Layer, RoutedBatch
from moeopt.kernels.quant import (
    activation_dtype,
    compute_dtype,
    stored_reduction,
    weight_dtype,
    weight_scale_dtype,
)
from moeopt.kernels.target import compile_resources, current_capability


def compile_binary(shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
    """Compiles for the active target; the binary serves every batch size."""
    tensors = (
        activation_dtype(shape),
        weight_dtype(shape),
        compute_dtype(shape),
        torch.float32 if shape.spec.activation_bits == 8 else None,
        weight_scale_dtype(shape) if shape.scales != "none" else None,
        torch.float32,
        torch.int32,
        torch.int32,
        torch.int32,
    )
    tiles = max_tiles(batch_size * shape.top_k, shape.num_experts, config.block_size_m)
    arguments = (*tensors, *_sizes(shape, role, batch_size * shape.top_k, tiles))
    options = options_for(shape, role, config, current_capability())
    return compile_resources(lambda: builtin_kernel.moe_kernel.warmup(*arguments, grid=(1,), **options))


def launch_options(layer: Layer, role: Role, config: LaunchConfig) -> dict[str, Any]:
    """Compile-time arguments of a launch where the layer lies."""
    on_cpu = layer.device.type == "cpu"
    return options_for(layer.shape, role, config, None if on_cpu else torch.cuda.get_device_capability(layer.device))


def launch(
    layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor, options: dict[str, Any]
) -> Callable[[], None]:
    """A closure that launches with these compile-time options."""
    shape, weights = layer.shape, layer.weights(role)
    if batch.role != role:
        raise ValueError(f"the batch is for role {batch.role!r}, the launch for {role!r}")
    expected = (batch.num_pairs, shape.output_rows(role))
    if out.shape != expected or not out.is_contiguous():
        raise ValueError(f"out has shape {tuple(out.shape)}: expected {expected}, contiguous")
    aligned = kept_with(
        batch.topk_ids,
        (shape.num_experts, config.block_size_m),
        lambda: align(batch.topk_ids, shape.num_experts, config.block_size_m),
    )
    tensors = (
        batch.a,
        weights.q,
        out,
        batch.a_scale,
        weights.scale,
        batch.topk_weights,
        aligned.sorted_ids,
        aligned.expert_ids,
        aligned.num_padded,
    )
    tiles_n = -(-shape.output_rows(role) // config.block_size_n)
    kernel: Any = builtin_kernel.moe_kernel
    if layer.device.type == "cpu":
        kernel = CpuKernel(kernel.fn)
    start = kernel[(aligned.num_tiles * tiles_n,)]
    return functools.partial(start, *tensors, *_sizes(shape, role, batch.num_pairs, aligned.num_tiles), **options)


def _sizes(shape: MoEShape, role: Role, num_pairs: int, tiles_m: int) -> tuple[int, ...]:
    return (shape.output_rows(role), shape.reduction(role), stored_reduction(shape, role), num_pairs, tiles_m)


def options_for(
    shape: MoEShape, role: Role, config: LaunchConfig, capability: tuple[int, int] | None
) -> dict[str, Any]:
    """Compile-time arguments of a launch. The capability is None for the interpreter."""
    block_n, block_k = shape.block_shape or (0, shape.group_size or 0)
    architecture = None if capability is None else architecture_of(capability)
    tile = (config.block_size_m, config.block_size_n)
    dependent = architecture is not None and architecture.dependent_launch
    options: dict[str, Any] = {
        "SCHEME": shape.scales,
        "BITS": shape.spec.weight_bits,
        "GROUP_N": block_n,
        "GROUP_K": block_k,
        "TOP_K": shape.top_k if role == "up" else 1,
        "ROUTED_WEIGHT": role == "down",
        "EVEN_N": shape.output_rows(role) % config.block_size_n == 0,
        "EVEN_K": shape.reduction(role) % config.block_size_k == 0,
        "SWAP_AB": architecture is not None and code_path(architecture, shape.spec, *tile, config.num_warps).swapped,
        "DEPENDENT_LAUNCH": dependent,
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
    }
    if capability is not None:
        options |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if dependent:
            options["launch_pdl"] = True
        if config.maxnreg:
            options["maxnreg"] = config.maxnreg
    return options
