"""Our own kernel: runs where no engine is installed, for every dtype and scheme.

On CPU tensors it runs through Triton's interpreter: slow, and exact enough to check results with.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moeopt import resources
from moeopt.errors import UnsupportedShapeError
from moeopt.gpu import GpuSpec
from moeopt.kernels import builtin_kernel
from moeopt.kernels.align import align, kept_with, max_tiles
from moeopt.kernels.base import KernelKey, MoEKernel
from moeopt.kernels.builtin_cpu import CpuKernel
from moeopt.kernels.defaults import engine_default
from moeopt.kernels.layer import Layer, RoutedBatch
from moeopt.kernels.quant import (
    activation_dtype,
    compute_dtype,
    scheme_of,
    stored_reduction,
    weight_dtype,
    weight_scale_shape,
)
from moeopt.kernels.target import compile_resources, current_capability
from moeopt.measure.base import Resources
from moeopt.shape import DTYPES, MoEShape, Role
from moeopt.space import LaunchConfig

_MAX_INT32: Final = 2**31 - 1


class BuiltinKernel(MoEKernel):
    """The kernel of :mod:`moeopt.kernels.builtin_kernel`. One binary of a config serves every batch size."""

    @property
    def key(self) -> KernelKey:
        """Named ``builtin``, with moeopt's version."""
        source = Path(builtin_kernel.__file__).read_bytes()
        return KernelKey("builtin", importlib.metadata.version("moeopt"), hashlib.sha256(source).hexdigest()[:16])

    def check(self, shape: MoEShape, gpu: GpuSpec) -> None:
        """Raises UnsupportedShapeError where the GPU lacks the dtype, or sizes do not fit the layout."""
        if shape.dtype == "fp8_w8a8" and gpu.compute_capability < (8, 9):
            raise UnsupportedShapeError(
                f"{gpu.name} has no fp8 tensor cores: fp8_w8a8 needs compute capability 8.9 or more, "
                "use int8_w8a8 or bf16"
            )
        for role in ("up", "down"):
            k, rows = shape.reduction(role), shape.output_rows(role)
            if shape.group_size and k % shape.group_size:
                raise UnsupportedShapeError(
                    f"group_size {shape.group_size} does not divide the {role} projection's reduction of {k}: "
                    "give the checkpoint's group size and the intermediate size after tensor parallelism"
                )
            if shape.group_size and (shape.group_size & (shape.group_size - 1) or shape.group_size < 16):
                raise UnsupportedShapeError(f"group_size is {shape.group_size}: give 16, 32, 64, 128 or 256")
            if rows * k > _MAX_INT32:
                raise UnsupportedShapeError(
                    f"one expert's {role} weight has {rows} x {k} elements: at most {_MAX_INT32:,} can be indexed"
                )

    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        """The GPU's limits, and this kernel's own rules."""
        shared = kernel_shared_bytes(config, shape, role, gpu)
        reason = resources.illegal_reason(config, shape, role, gpu, shared=shared)
        if reason:
            return reason
        if config.use_tma:
            return "USE_TMA is set: the builtin kernel loads weights without TMA"
        block_k = config.block_size_k
        for name, size in (("M", config.block_size_m), ("N", config.block_size_n), ("K", block_k)):
            if size < 16 or size & (size - 1):
                return f"BLOCK_SIZE_{name} is {size}: a power of two from 16 on is needed"
        if block_k < 32 and DTYPES[shape.dtype].activation_bits == 8:
            return f"BLOCK_SIZE_K is {block_k}: 8-bit tensor cores need 32"
        if config.num_warps & (config.num_warps - 1):
            return f"num_warps is {config.num_warps}: a power of two is needed"
        if shape.block_shape and shape.block_shape[1] % block_k:
            return (
                f"BLOCK_SIZE_K {block_k} does not divide block_k {shape.block_shape[1]}: a step would straddle scales"
            )
        return None

    def default_config(self, shape: MoEShape, role: Role, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
        """SGLang's default."""
        return engine_default("sglang", shape, batch_size, gpu)

    def specialisation(self, shape: MoEShape, role: Role, batch_size: int) -> str:
        """The role: token counts are not part of the binary."""
        return role

    def compile(self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
        """Compiles for the active target; the binary serves every batch size."""
        scales = weight_scale_shape(shape, role) is not None
        output = compute_dtype(shape)
        weight_scale = output if scheme_of(shape) == "group" else torch.float32
        quantised = DTYPES[shape.dtype].activation_bits == 8
        tensors = (
            activation_dtype(shape),
            weight_dtype(shape),
            output,
            torch.float32 if quantised else None,
            weight_scale if scales else None,
            torch.float32,
            torch.int32,
            torch.int32,
            torch.int32,
        )
        tiles = max_tiles(batch_size * shape.top_k, shape.num_experts, config.block_size_m)
        arguments = (*tensors, *_sizes(shape, role, batch_size * shape.top_k, tiles))
        options = _options(shape, role, config, current_capability())
        return compile_resources(lambda: builtin_kernel.moe_kernel.warmup(*arguments, grid=(1,), **options))

    def bind(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> Callable[[], None]:
        """A launch of the kernel; on CPU tensors, a run of Triton's interpreter."""
        on_cpu = layer.device.type == "cpu"
        capability = None if on_cpu else torch.cuda.get_device_capability(layer.device)
        return launch(layer, role, batch, config, out, _options(layer.shape, role, config, capability))


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


def kernel_shared_bytes(config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> int:
    """Bytes of shared memory of one program.

    With fewer bits in the weights than in the activations, the 64-row instruction of compute capability 9 reads one
    tile of weights converted to 16 bits, and the pipeline holds one tile less of those as stored. For weights in groups
    :func:`moeopt.resources.shared_bytes` counts that already.
    """
    need = resources.shared_bytes(config, shape, role, gpu)
    bits = DTYPES[shape.dtype].weight_bits
    converts = bits < DTYPES[shape.dtype].activation_bits and shape.group_size is None
    if converts and gpu.compute_capability[0] == 9 and config.block_size_m >= 64:
        need += config.block_size_n * config.block_size_k * (16 - bits) // 8
    return need


def swaps_operands(shape: MoEShape, config: LaunchConfig, capability: tuple[int, int] | None) -> bool:
    """Whether the transposed tile is computed.

    On compute capability 9 the fast tensor-core instruction has 64 rows. With fewer rows than that in a tile the
    weights take that side; SGLang does so for fp8 under the same conditions.
    """
    return (
        capability is not None
        and capability[0] == 9
        and shape.dtype == "fp8_w8a8"
        and config.block_size_m < 64 <= config.block_size_n
    )


def _sizes(shape: MoEShape, role: Role, num_pairs: int, tiles_m: int) -> tuple[int, ...]:
    return (shape.output_rows(role), shape.reduction(role), stored_reduction(shape, role), num_pairs, tiles_m)


def _options(shape: MoEShape, role: Role, config: LaunchConfig, capability: tuple[int, int] | None) -> dict[str, Any]:
    """Compile-time arguments of a launch. The capability is None for the interpreter."""
    block_n, block_k = shape.block_shape or (0, shape.group_size or 0)
    options: dict[str, Any] = {
        "SCHEME": scheme_of(shape),
        "BITS": DTYPES[shape.dtype].weight_bits,
        "GROUP_N": block_n,
        "GROUP_K": block_k,
        "TOP_K": shape.top_k if role == "up" else 1,
        "ROUTED_WEIGHT": role == "down",
        "EVEN_N": shape.output_rows(role) % config.block_size_n == 0,
        "EVEN_K": shape.reduction(role) % config.block_size_k == 0,
        "SWAP_AB": swaps_operands(shape, config, capability),
        "DEPENDENT_LAUNCH": capability is not None and capability[0] >= 9,
        "BLOCK_SIZE_M": config.block_size_m,
        "BLOCK_SIZE_N": config.block_size_n,
        "BLOCK_SIZE_K": config.block_size_k,
        "GROUP_SIZE_M": config.group_size_m,
    }
    if capability is not None:
        options |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if options["DEPENDENT_LAUNCH"]:
            options["launch_pdl"] = True
        if config.maxnreg:
            options["maxnreg"] = config.maxnreg
    return options
