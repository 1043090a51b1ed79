"""Interface of a tunable kernel.

torch and triton are imported by the implementations, never by ``import moeopt``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Resources

if TYPE_CHECKING:
    from torch import Tensor

    from moeopt.kernels.layer import Layer, RoutedBatch


class MoEKernel(ABC):
    """One implementation of the fused MoE kernel, both roles.

    Instances are cheap and picklable: the compile pool and the GPU worker each hold one.
    """

    @property
    @abstractmethod
    def key(self) -> KernelKey:
        """Which kernel this is."""

    @abstractmethod
    def check(self, shape: MoEShape, gpu: GpuSpec) -> None:
        """Raises UnsupportedShapeError, with what to do, where the kernel cannot run the shape on the GPU."""

    @abstractmethod
    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        """Why the config cannot run (shared memory, threads, the kernel's own rules), or None.

        Decided without compiling.
        """

    @abstractmethod
    def default_config(self, shape: MoEShape, role: Role, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
        """The config its engine uses where it finds no file (the builtin kernel: the default engine's)."""

    @abstractmethod
    def specialisation(self, shape: MoEShape, role: Role, batch_size: int) -> str:
        """Names the binary that this batch size runs: equal strings share one (given the config)."""

    @abstractmethod
    def compile(self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
        """Compiles for the active Triton driver's target (see :mod:`moeopt.kernels.target`), launching nothing.

        Fills Triton's cache with the very binary that :meth:`bind` launches for this batch size.
        Whatever the compiler raises comes through.
        """

    @abstractmethod
    def bind(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> Callable[[], None]:
        """A closure that launches the kernel once on the current stream; CUDA-graph safe.

        All set-up (alignment of tokens to experts, descriptors) happens here, not in the closure.

        Args:
            layer: Weights and scales on the GPU.
            role: Which projection.
            batch: Routed tokens on the GPU with the role's activations.
            config: How to launch.
            out: [M * top_k, output rows], written by the launch.
        """

    def load(self, shape: MoEShape) -> str:
        """Readies this process for launches; called in the GPU process, before the first.

        Args:
            shape: What will be launched.

        Returns:
            What is launched, in words.
        """
        return f"the {self.key.name} kernel"

    def skips_remote_experts(self, shape: MoEShape) -> bool:
        """Whether a launch leaves the rows of pairs whose expert is on another GPU as they are, not zeros."""
        return False

    def space_extras(self, shape: MoEShape, gpu: GpuSpec) -> Sequence[str]:
        """Keys beyond the six that the wide space may use with this kernel (``maxnreg``, ``USE_TMA``)."""
        return ("maxnreg",)
