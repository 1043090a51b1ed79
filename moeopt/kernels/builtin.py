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
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import illegal_reason, tile_reason, unsupported_reason
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import MoEShape, Role
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
        if reason := unsupported_reason(shape, gpu):
            raise UnsupportedShapeError(reason)
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
        if config.use_tma:
            return "USE_TMA is set: the builtin kernel loads weights without TMA"
        return illegal_reason(config, shape, role, gpu) or tile_reason(config, shape)

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
