"""What a device is: "give me times for these configs".

The tuning loop knows nothing of CUDA. A recording, a GPU, a set of GPUs, a Ray cluster and a
fault-injecting fake are all a :class:`Device`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Self

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop


class Device(ABC):
    """Times launch configs of one shape on one kind of GPU."""

    shape: MoEShape
    gpu: GpuSpec
    info: Provenance

    @property
    @abstractmethod
    def batch_sizes(self) -> tuple[int, ...] | None:
        """The batch sizes it can time, ascending; None for any."""

    @abstractmethod
    def candidates(self, configs: Sequence[LaunchConfig]) -> list[LaunchConfig]:
        """Of these configs, those that fit the GPU's limits: the others are never compiled."""

    @abstractmethod
    def default_config(self, role: Role, batch_size: int) -> LaunchConfig:
        """The config that an engine uses where it finds no file."""

    def space_extras(self) -> tuple[str, ...]:
        """Keys beyond the six that the wide space may vary here (``maxnreg``, ``USE_TMA``)."""
        return ("maxnreg",)

    def prefetch(self, configs: Iterable[LaunchConfig]) -> None:
        """Compiles these in the background, best first, where the device can; they may soon be asked for."""

    @abstractmethod
    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        """Times the jobs and yields one measurement for each, as they are done.

        What has been compiled is timed while the rest compiles. ``race`` is called in the calling
        thread. Closing the iterator drops what has not begun.
        """

    def roofline_us(self, cell: Cell) -> float | None:
        """Microseconds below which no kernel can go on this GPU, or None where that is not known."""
        return None

    def launch_bytes(self, cell: Cell) -> float | None:
        """Bytes that the cell's launches move at least, or None where the routing is not known here."""
        from moeopt.measure.roofline import launch_bytes

        return launch_bytes(self.shape, cell, self.info.routing)

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
