"""Our own kernel: runs where no engine is installed, for every dtype and scheme.

What is known of it without torch: importing this module takes no part of the seconds that torch and
Triton take, and the process that searches never needs them. :mod:`moeopt.kernels.builtin_launch` has the rest.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeopt import engines
from moeopt.core import limits as resources
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import DTYPES, MoEShape, Role
from moeopt.core.trial import Resources
from moeopt.errors import UnsupportedShapeError
from moeopt.kernels.base import MoEKernel

if TYPE_CHECKING:
    from torch import Tensor

    from moeopt.kernels.layer import Layer, RoutedBatch

_SOURCE: Final = Path(__file__).with_name("builtin_kernel.py")
_MAX_INT32: Final = 2**31 - 1


class BuiltinKernel(MoEKernel):
    """The kernel of :mod:`moeopt.kernels.builtin_kernel`. One binary of a config serves every batch size."""

    @property
    def key(self) -> KernelKey:
        """Named ``builtin``, with moeopt's version."""
        digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()
        return KernelKey("builtin", importlib.metadata.version("moeopt"), digest[:16])

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
        """The default engine's."""
        return engines.get(engines.DEFAULT).default_config(shape, batch_size, gpu)

    def specialisation(self, shape: MoEShape, role: Role, batch_size: int) -> str:
        """The role: token counts are not part of the binary."""
        return role

    def compile(self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
        """Compiles for the active target; the binary serves every batch size."""
        from moeopt.kernels.builtin_launch import compile_binary

        return compile_binary(shape, role, batch_size, config)

    def bind(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> Callable[[], None]:
        """A launch of the kernel; on CPU tensors, a run of Triton's interpreter."""
        from moeopt.kernels.builtin_launch import launch, launch_options

        return launch(layer, role, batch, config, out, launch_options(layer, role, config))


def kernel_shared_bytes(config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> int:
    """Bytes of shared memory of one program.

    With fewer bits in the weights than in the activations, the 64-row instruction of compute capability 9 reads one
    tile of weights converted to 16 bits, and the pipeline holds one tile less of those as stored. For weights in groups
    :func:`moeopt.core.limits.shared_bytes` counts that already.
    """
    need = resources.shared_bytes(config, shape, role, gpu)
    bits = DTYPES[shape.dtype].weight_bits
    converts = bits < DTYPES[shape.dtype].activation_bits and shape.group_size is None
    if converts and gpu.compute_capability[0] == 9 and config.block_size_m >= 64:
        need += config.block_size_n * config.block_size_k * (16 - bits) // 8
    return need
