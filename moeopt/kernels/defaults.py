"""The configs that SGLang and vLLM use where they find no file.

Rules as of SGLang 0.5.23 and vLLM 0.33.0.
"""

from __future__ import annotations

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape

# Triton's own where an engine sets none.
_TRITON_WARPS, _TRITON_STAGES = 4, 3
_SMALL_SHARED_MEMORY = 128 * 1024


def engine_default(engine: str, shape: MoEShape, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
    """The config of one batch size, for both roles.

    Args:
        engine: ``sglang`` or ``vllm``.
        shape: The layer.
        batch_size: Tokens in one forward pass.
        gpu: SGLang picks smaller fp8 tiles on GPUs with under 128 KiB of shared memory.
    """
    if engine == "vllm":
        return _vllm(shape, batch_size)
    return _sglang(shape, batch_size, gpu)


def _sglang(shape: MoEShape, m: int, gpu: GpuSpec) -> LaunchConfig:
    few = m <= shape.num_experts
    if shape.dtype == "fp8_w8a8" and shape.block_shape:
        return LaunchConfig(64, shape.block_shape[0], shape.block_shape[1], 32, 4, 3)
    if shape.dtype == "fp8_w8a8":
        if gpu.shared_memory_per_block_optin < _SMALL_SHARED_MEMORY:
            return LaunchConfig(32, 64, 256, 1, 4, 4) if few else LaunchConfig(64, 128, 256, 64, 4, 2)
        return LaunchConfig(64, 128, 128, 1, 4, 4) if few else LaunchConfig(128, 256, 128, 32, 8, 4)
    if few:
        return LaunchConfig(16, 32, 64, 1, _TRITON_WARPS, _TRITON_STAGES)
    return LaunchConfig(64, 64, 32, 8, _TRITON_WARPS, _TRITON_STAGES)


def _vllm(shape: MoEShape, m: int) -> LaunchConfig:
    if shape.dtype == "fp8_w8a8" and shape.block_shape:
        block_n, block_k = shape.block_shape
        narrow = m <= 8 and block_n % 64 == 0
        return LaunchConfig(
            16 if m <= 64 else 64,
            64 if narrow else block_n,
            block_k,
            1 if m <= 16 else 32,
            4,
            4 if narrow and m <= 4 else 3,
        )
    if shape.group_size:
        # Its wna16 Triton kernel: tiles of N and K are chosen at the launch.
        block_n, block_k = (32, 64) if m == 1 else (64, 32)
        return LaunchConfig(
            16 if m <= 20 else 32 if m <= 40 else 64, block_n, block_k, 1, _TRITON_WARPS, _TRITON_STAGES
        )
    fp8 = shape.dtype == "fp8_w8a8"
    return LaunchConfig(
        block_size_m=16 if m <= 32 else 32 if m <= 96 else 64 if m <= 512 else 128,
        block_size_n=64 if m <= 64 else 128,
        block_size_k=128 if fp8 or m <= 64 else 64,
        group_size_m=16 if m // shape.num_experts > 128 else 1,
        num_warps=4 if m <= 128 else 8,
        num_stages=4 if m <= 32 else 3,
    )
