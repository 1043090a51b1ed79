"""What a device is: "give me times for these configs".

The tuning loop knows nothing of CUDA. A recording, a GPU, a set of GPUs, a Ray cluster and a
fault-injecting fake are all a :class:`Device`.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from moeopt.gpu import GpuSpec
from moeopt.shape import MoEShape, Role
from moeopt.space import LaunchConfig

# The words of the auto-tuning field's shared results format for why a config has no time.
Reason = Literal["constraints", "compile", "runtime", "correctness", "timeout"]
Status = Literal["ok", "raced_out", "rejected", "failed"]


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One (role, batch size): what gets one launch config and one Optuna study.

    In joint mode the role is ``joint`` and its time is the sum of both roles' times.
    """

    role: Role | Literal["joint"]
    batch_size: int

    @property
    def roles(self) -> tuple[Role, ...]:
        """The kernel launches that the cell's time is made of."""
        return ("up", "down") if self.role == "joint" else (self.role,)


@dataclass(frozen=True, order=True, slots=True)
class Job:
    """A request: time this config for this cell."""

    cell: Cell
    config: LaunchConfig


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler says of one binary.

    Attributes:
        registers: Per thread.
        spills: Bytes of local memory per thread.
        shared_bytes: Shared memory of one program.
        compile_s: Seconds of compiling (0 where it came from a cache).
    """

    registers: int
    spills: int
    shared_bytes: int
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a config has no time, in one line.

    Attributes:
        reason: One of the field's words.
        message: One line.
        log: Path of a file that holds what the compiler or the GPU printed, or None.
    """

    reason: Reason
    message: str
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The answer to one :class:`Job`.

    Attributes:
        job: What was asked.
        status: ``ok``: fully timed; ``raced_out``: stopped by the pruner after some rounds;
            ``rejected``: compiled, but never launched because of its resources; ``failed``: see failure.
        us: Microseconds per launch of each round. In joint mode the sum over both roles.
        relative_error: Relative Frobenius error against the reference (the worse of both roles), or None.
        resources: Per role, where compiled.
        failure: Set if failed or rejected.
        extra: Facts worth keeping with the trial (clock, temperature, "disturbed", ...), JSON-ready.
    """

    job: Job
    status: Status
    us: tuple[float, ...] = ()
    relative_error: float | None = None
    resources: dict[Role, Resources] = field(default_factory=dict)
    failure: Failure | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def median_us(self) -> float:
        """Median over the rounds; infinite where nothing was timed."""
        return statistics.median(self.us) if self.us else float("inf")


# Called by a device after each round of a job with the rounds so far: True ends the measurement.
Race = Callable[[Job, Sequence[float]], bool]


def never_stop(job: Job, rounds: Sequence[float]) -> bool:
    """A race that everything survives."""
    return False


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is part of a study's exact key, JSON-ready strings and numbers only.

    Attributes:
        source: First line of a run's output: what the times come from.
        kernel: Name of the kernel (``builtin``, ``sglang``, ``vllm``).
        kernel_version: Its version, or "".
        kernel_hash: Hash of its source.
        triton: Triton's version.
        torch: torch's version.
        driver: The GPU driver's version, or "".
        routing: Key of the routing distribution.
        recorded: Whether the times are replayed.
    """

    source: str
    kernel: str
    kernel_version: str
    kernel_hash: str
    triton: str
    torch: str
    driver: str = ""
    routing: str = "uniform"
    recorded: bool = False


class Device(ABC):
    """Times launch configs of one shape on one kind of GPU."""

    shape: MoEShape
    gpu: GpuSpec
    info: DeviceInfo

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

    def hint(self, configs: Iterable[LaunchConfig]) -> None:
        """Says that these may soon be asked for, best first. A device may compile ahead; it need not."""

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
