"""Needs of a launch config, computed without compiling, against the limits of a GPU."""

from __future__ import annotations

from typing import Final

from moeopt.core.architecture import REGISTER_ALLOCATION_UNIT
from moeopt.core.code_path import CodePath, Number, code_path, converted_bytes, pipeline_bytes
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role

# A barrier of datacenter Blackwell's pipeline.
_BARRIER_BYTES: Final = 8


def shared_bytes(
    config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec, *, column_scales: bool = False
) -> int:
    """Bytes of shared memory of one program: the pipeline's buffers of A and B tiles, and what passes through.

    Beside the buffers (:func:`~moeopt.core.code_path.pipeline_bytes`), block-wise and group-wise scales pass through
    shared memory once they are as many as the threads, and tcgen05 has barriers. GROUP_SIZE_M and maxnreg do not
    matter.

    Exact for the builtin kernel (``tests/core/test_limits_exact.py`` has the compiler's own numbers).

    Args:
        config: What may be tried.
        shape: The layer.
        role: Which projection.
        gpu: Its architecture decides how tiles are read.
        column_scales: Whether a block-wise scheme's scale is loaded for each column of a tile, even where
            the tile is within one block.
    """
    spec, architecture, stages = shape.spec, gpu.architecture, config.num_stages
    bm, bn, bk = config.block_size_m, config.block_size_n, config.block_size_k
    path = code_path(architecture, spec, bm, bn, config.num_warps)
    buffers = pipeline_bytes(path, spec, bm, bn, bk, stages)
    converted = converted_bytes(path, spec, bn, bk)
    tensor_memory = architecture.instruction == "tcgen05" and bool(path.from_shared)
    scales = _scale_bytes(config, shape, column_scales, tensor_memory) if shape.block_shape or shape.group_size else 0
    if not tensor_memory:
        return buffers + max(converted, scales)
    if shape.group_size and bk <= shape.group_size:
        # The sum of each step is scaled: nothing is loaded meanwhile.
        buffers = pipeline_bytes(CodePath(False, False), spec, bm, bn, bk, stages)
        return buffers + max(converted, scales) + _BARRIER_BYTES
    return buffers + converted + scales + 2 * _BARRIER_BYTES


def _scale_bytes(config: LaunchConfig, shape: MoEShape, column_scales: bool, tensor_memory: bool) -> int:
    """Bytes through which scales change their layout, once they are as many as the threads.

    Those of a block-wise scheme are float32. An accumulator in tensor memory has a row a thread: its rows' scales move
    only if they are more, and beside those of the columns. Those of a group-wise scheme have 16 bits: one a column and
    group of the tile (Triton 3.6).
    """
    bm, bn, threads = config.block_size_m, config.block_size_n, 32 * config.num_warps
    if shape.group_size:
        scales = bn * max(1, config.block_size_k // shape.group_size)
        return 2 * scales if scales >= threads else 0
    assert shape.block_shape is not None
    columns = bn if column_scales or bn > shape.block_shape[0] else 0
    if tensor_memory:
        return 4 * ((bm if bm > threads else 0) + (columns if columns >= threads else 0))
    return 4 * max((n for n in (bm, columns) if n >= threads), default=0)


def gptq_shared_bytes(config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec, triton: tuple[int, ...]) -> int:
    """The same of the engines' kernel for weights in groups (``fused_moe_kernel_gptq_awq``).

    The activations are pipelined, 8-bit weights are too and 4-bit weights are not, and one tile of converted weights
    lies beside them. Where one step covers K, which this kernel is compiled for, there is no loop to pipeline; Triton
    3.9 then has 8-bit weights of the largest tiles on Hopper twice.

    Args:
        config: What may be tried.
        shape: The layer.
        role: Which projection.
        gpu: Where it runs.
        triton: Which version compiles.
    """
    spec, bk = shape.spec, config.block_size_k
    path = code_path(gpu.architecture, spec, config.block_size_m, config.block_size_n, config.num_warps)
    wgmma = path.from_shared and gpu.architecture.instruction == "wgmma"
    activations, weights = config.block_size_m * bk * 2, config.block_size_n * bk
    if bk >= shape.reduction(role):
        outputs_per_thread = config.block_size_m * config.block_size_n // (32 * config.num_warps)
        large = config.block_size_m >= 256 and outputs_per_thread <= 128
        twice = wgmma and spec.weight_bits == 8 and large and triton >= (3, 9)
        return activations + (4 if twice else 2) * weights
    stages = config.num_stages
    pipelined = (stages if wgmma else stages - 1) * activations
    return pipelined + (stages - 1) * weights * (spec.weight_bits == 8) + 2 * weights


def blocks_per_multiprocessor(
    gpu: GpuSpec, shared: Number, registers: Number, num_warps: Number
) -> dict[str, Number | int]:
    """Resident blocks (programs) that each limit of a multiprocessor allows: the least one holds.

    Args:
        gpu: Its limits.
        shared: Bytes of shared memory of a program.
        registers: Of a thread.
        num_warps: Of a program.
    """
    per_warp = -(-(registers * 32) // REGISTER_ALLOCATION_UNIT) * REGISTER_ALLOCATION_UNIT
    return {
        "shared memory": gpu.shared_memory_per_multiprocessor // (shared + gpu.architecture.reserved_shared_bytes),
        "registers": gpu.registers_per_multiprocessor // (per_warp * num_warps),
        "warps": gpu.warps_per_multiprocessor // num_warps,
        "blocks": gpu.architecture.max_blocks_per_sm,
    }


def unsupported_reason(shape: MoEShape, gpu: GpuSpec) -> str | None:
    """Why the GPU cannot run the scheme at all, in one line, or None."""
    if shape.spec.compute == "fp8" and not gpu.architecture.fp8:
        major, minor = gpu.compute_capability
        return (
            f"{gpu.name} has no fp8 tensor cores: {shape.dtype} needs compute capability 8.9 or more and it has "
            f"{major}.{minor}: tune int8_w8a8 or a 16-bit dtype there"
        )
    return None


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


def tile_reason(config: LaunchConfig, shape: MoEShape) -> str | None:
    """Why no GPU can run the config with a Triton kernel of this design, in one line, or None."""
    block_k = config.block_size_k
    for name, size in (("M", config.block_size_m), ("N", config.block_size_n), ("K", block_k)):
        if size < 16 or size & (size - 1):
            return f"BLOCK_SIZE_{name} is {size}: a power of two from 16 on is needed"
    if block_k < 32 and shape.spec.activation_bits == 8:
        return f"BLOCK_SIZE_K is {block_k}: 8-bit tensor cores need 32"
    if config.num_warps & (config.num_warps - 1):
        return f"num_warps is {config.num_warps}: a power of two is needed"
    if shape.block_shape and shape.block_shape[1] % block_k:
        return f"BLOCK_SIZE_K {block_k} does not divide block_k {shape.block_shape[1]}: a step would straddle scales"
    return None
