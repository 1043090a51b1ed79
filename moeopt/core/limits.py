"""Needs of a launch config, computed without compiling, against the limits of a GPU."""

from __future__ import annotations

from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import DTYPES, MoEShape, Role

# A barrier of datacenter Blackwell's pipeline.
_BARRIER_BYTES: Final = 8


def shared_bytes(
    config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec, *, column_scales: bool = False
) -> int:
    """Bytes of shared memory of one program: the pipeline's buffers of A and B tiles.

    Triton keeps ``num_stages - 1`` buffers where the tensor cores read registers (mma), and
    ``num_stages`` where they read shared memory: wgmma on compute capability 9 and tcgen05 on 10, both
    from 64 rows and 4 warps on, the latter not with int8 and with some bytes for barriers. With fp8 and
    fewer rows than that SGLang's kernel, vLLM's and ours swap the operands on compute capability 9, so
    that the 64 columns count. Beside the buffers, block-wise and group-wise scales pass through shared
    memory once they are as many as the threads. GROUP_SIZE_M and maxnreg do not matter.

    Exact for the builtin kernel (``tests/core/test_limits_exact.py`` has the compiler's own numbers).

    Args:
        config: What may be tried.
        shape: The layer.
        role: Which projection.
        gpu: Its compute capability decides how tiles are read.
        column_scales: Whether a block-wise scheme's scale is loaded for each column of a tile, even where
            the tile is within one block.
    """
    spec = DTYPES[shape.dtype]
    activations = config.block_size_m * config.block_size_k * spec.activation_bits // 8
    weights = config.block_size_n * config.block_size_k * spec.weight_bits // 8
    # What weights in groups become in registers: the tensor cores read it from shared memory.
    tile = config.block_size_n * config.block_size_k * spec.activation_bits // 8
    mma = config.num_stages - 1
    if _tcgen05(config, shape, gpu):
        if shape.group_size is None:
            scales = _block_scale_bytes(config, shape, column_scales, tensor_memory=True)
            return config.num_stages * (activations + weights) + scales + 2 * _BARRIER_BYTES
        if config.block_size_k <= shape.group_size:
            return mma * (activations + weights) + max(tile, _group_scale_bytes(config, shape)) + _BARRIER_BYTES
        scales = _group_scale_bytes(config, shape)
        return config.num_stages * activations + mma * weights + tile + scales + 2 * _BARRIER_BYTES
    wgmma = _wgmma(config, shape, gpu)
    buffers = config.num_stages if wgmma else mma
    if shape.group_size is None:
        return buffers * (activations + weights) + _block_scale_bytes(config, shape, column_scales)
    return buffers * activations + mma * weights + max(tile if wgmma else 0, _group_scale_bytes(config, shape))


def _wgmma(config: LaunchConfig, shape: MoEShape, gpu: GpuSpec) -> bool:
    """Whether the tensor cores are Hopper's that read shared memory; a swapped fp8 tile counts its columns."""
    fp8 = DTYPES[shape.dtype].compute == "fp8"
    rows = max(config.block_size_m, config.block_size_n) if fp8 else config.block_size_m
    return gpu.compute_capability[0] == 9 and rows >= 64 and config.num_warps >= 4


def _tcgen05(config: LaunchConfig, shape: MoEShape, gpu: GpuSpec) -> bool:
    """Whether they are those of datacenter Blackwell, which Triton does not use for int8."""
    served = gpu.compute_capability[0] == 10 and DTYPES[shape.dtype].compute != "int8"
    return served and config.block_size_m >= 64 and config.num_warps >= 4


def _block_scale_bytes(
    config: LaunchConfig, shape: MoEShape, column_scales: bool, *, tensor_memory: bool = False
) -> int:
    """Bytes through which the float32 scales of a block-wise scheme change their layout.

    An accumulator in tensor memory has a row a thread: its rows' scales move only if they are more, and
    beside those of the columns.
    """
    if shape.block_shape is None:
        return 0
    columns = config.block_size_n if column_scales or config.block_size_n > shape.block_shape[0] else 0
    threads = 32 * config.num_warps
    if tensor_memory:
        rows = config.block_size_m if config.block_size_m > threads else 0
        return 4 * (rows + (columns if columns >= threads else 0))
    return 4 * max((n for n in (config.block_size_m, columns) if n >= threads), default=0)


def _group_scale_bytes(config: LaunchConfig, shape: MoEShape) -> int:
    """The same for the 16-bit scales of a group-wise scheme: one a column and group of the tile (Triton 3.6)."""
    scales = config.block_size_n * max(1, config.block_size_k // (shape.group_size or config.block_size_k))
    return 2 * scales if scales >= 32 * config.num_warps else 0


def illegal_reason(
    config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec, *, shared: int | None = None
) -> str | None:
    """Why the config cannot run on the GPU, in one line, or None.

    Covers shared memory, threads and registers of any Triton kernel of this design; a kernel's own
    rules come on top (``MoEKernel.illegal_reason``).

    Args:
        config: What may be tried.
        shape: The layer.
        role: Which projection.
        gpu: Its limits.
        shared: Bytes of shared memory where the kernel needs others than :func:`shared_bytes`.
    """
    if shape.block_shape and config.block_size_k > shape.block_shape[1]:
        return f"BLOCK_SIZE_K {config.block_size_k} is over block_k {shape.block_shape[1]}: one scale per step is read"
    need = shared_bytes(config, shape, role, gpu) if shared is None else shared
    if need > gpu.shared_memory_per_block_optin:
        return f"needs {need:,} bytes of shared memory, {gpu.name} has {gpu.shared_memory_per_block_optin:,} per block"
    if config.num_warps > gpu.warps_per_multiprocessor or config.num_warps > 32:
        return f"needs {config.num_warps} warps, {gpu.name} runs {min(32, gpu.warps_per_multiprocessor)} per block"
    if config.maxnreg and config.maxnreg * config.num_warps * 32 > gpu.registers_per_multiprocessor:
        return f"needs {config.maxnreg * config.num_warps * 32:,} registers of {gpu.registers_per_multiprocessor:,}"
    return None
