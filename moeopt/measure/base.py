"""Devices: what times launch configs.

The tuning loop knows nothing of CUDA. A recording, a GPU, a set of GPUs, a Ray cluster and a
fault-injecting fake are all a :class:`Device`: a :class:`DeviceSpec`, which is a value, and a way to
measure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import Provenance
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.kernels.base import MoEKernel
from moeopt.measure.roofline import launch_bytes


def unknown_roofline(cell: Cell) -> None:
    """Roofline of a device that knows none."""


@dataclass(frozen=True)
class DeviceSpec:
    """What a device is: all that can be said of it without measuring.

    :meth:`of_kernel` makes one from a kernel's rules.

    Attributes:
        shape: The layer that it times.
        gpu: The GPU's limits.
        provenance: Part of the study's key.
        candidates: Of configs, those that fit the GPU, in the same order: the others are never compiled.
        default_config: The config that an engine uses where it finds no file, by role and batch size.
        roofline_us: Microseconds below which no kernel can go on this GPU, or None where that is not known.
        batch_sizes: The batch sizes that it can time, ascending; None for any.
        space_extras: Keys beyond the six that the wide space may vary (``maxnreg``, ``USE_TMA``).
        routing: The routing as it was given, where that says more than its key in ``provenance``, or "".
        seed: Of the routings.
    """

    shape: MoEShape
    gpu: GpuSpec
    provenance: Provenance
    candidates: Callable[[Sequence[LaunchConfig]], list[LaunchConfig]]
    default_config: Callable[[Role, int], LaunchConfig]
    roofline_us: Callable[[Cell], float | None] = unknown_roofline
    batch_sizes: tuple[int, ...] | None = None
    space_extras: tuple[str, ...] = ("maxnreg",)
    routing: str = ""
    seed: int = 0

    @classmethod
    def of_kernel(cls, kernel: MoEKernel, shape: MoEShape, gpu: GpuSpec, provenance: Provenance) -> DeviceSpec:
        """What a GPU is with a kernel, whose rules and defaults hold.

        Args:
            kernel: Decides what is legal.
            shape: The layer.
            gpu: The GPU's limits.
            provenance: Part of the study's key.
        """
        rules = KernelRules(kernel, shape, gpu)
        extras = tuple(kernel.space_extras(shape, gpu))
        return cls(shape, gpu, provenance, rules.candidates, rules.default_config, space_extras=extras)

    def launch_bytes(self, cell: Cell) -> float | None:
        """Bytes that the cell's launches move at least, or None where the routing is not known here."""
        return launch_bytes(self.shape, cell, self.routing or self.provenance.routing, self.seed)


@dataclass(frozen=True)
class KernelRules:
    """What a kernel says of configs on a GPU."""

    kernel: MoEKernel
    shape: MoEShape
    gpu: GpuSpec

    def illegal_reason(self, config: LaunchConfig, role: Role) -> str | None:
        """Why the config cannot run in a role, or None."""
        return self.kernel.illegal_reason(config, self.shape, role, self.gpu)

    def candidates(self, configs: Sequence[LaunchConfig]) -> list[LaunchConfig]:
        """Those that fit in at least one role; a job for the other is answered without a launch."""
        return [c for c in configs if any(self.illegal_reason(c, role) is None for role in ROLES)]

    def default_config(self, role: Role, batch_size: int) -> LaunchConfig:
        """The kernel's."""
        return self.kernel.default_config(self.shape, role, batch_size, self.gpu)


class Device(ABC):
    """Times launch configs of one shape on one kind of GPU.

    Args:
        spec: What it is.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec

    @abstractmethod
    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        """Times the jobs and yields one measurement for each, as they are done.

        What has been compiled is timed while the rest compiles. ``race`` is called in the calling
        thread. Closing the iterator drops what has not begun. What fails is a measurement that says why.
        """

    def prefetch(self, configs: Iterable[LaunchConfig]) -> None:
        """Compiles these in the background, best first, where the device can; they may soon be asked for."""

    def control_us(self) -> float | None:
        """Microseconds of a config that is the same on all GPUs of a kind, timed now: shows whether they agree.

        Returns:
            0 for recorded times, which need no comparing; None where it has none.
        """
        return 0.0 if self.spec.provenance.recorded else None

    def notices(self) -> tuple[str, ...]:
        """What a user should know of how it was measured, once something has been."""
        return ()

    def close(self) -> None:
        """Frees the GPU and ends all processes. May be called more than once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WrappedDevice(Device):
    """A device that does something of its own around another one: all but that is handed on.

    Args:
        device: The other one.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device.spec)
        self.device = device

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        return self.device.measure(jobs, race)

    def prefetch(self, configs: Iterable[LaunchConfig]) -> None:
        self.device.prefetch(configs)

    def control_us(self) -> float | None:
        return self.device.control_us()

    def notices(self) -> tuple[str, ...]:
        return self.device.notices()

    def close(self) -> None:
        self.device.close()
