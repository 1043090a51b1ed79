"""Benches: what a worker process times with, a GPU or a stand-in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from moeopt.core.gpu import GpuSpec
from moeopt.core.trial import Cell, Job, Reason


class BenchError(Exception):
    """Why a config has no time, where the bench knows the reason.

    Attributes:
        reason: One of the field's words.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class BenchFacts:
    """What an opened bench says of itself.

    Attributes:
        gpu: The GPU as torch sees it; None where there is none.
        kernel: What is launched, in words.
        timing: How it is timed, in words.
        torch: torch's version.
        free_bytes: Memory that was free before.
        open_s: Seconds that opening took.
    """

    gpu: GpuSpec | None = None
    kernel: str = ""
    timing: str = ""
    torch: str = ""
    free_bytes: int = 0
    open_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a config's first launch.

    Attributes:
        relative_error: Against the reference, the worse of both roles in joint mode.
        expected_s: Seconds that one round may take, from the one launch that was checked.
    """

    relative_error: float
    expected_s: float


@dataclass(slots=True)
class BenchCounts:
    """What a bench has done so far.

    Attributes:
        compiled: Kernels compiled in this process; 0 where the compile pool did its work.
        loaded: Kernels taken from the cache.
        gpu_s: Seconds in which the GPU ran kernels that were timed or checked.
    """

    compiled: int = 0
    loaded: int = 0
    gpu_s: float = 0.0

    def __add__(self, other: BenchCounts) -> BenchCounts:
        return BenchCounts(self.compiled + other.compiled, self.loaded + other.loaded, self.gpu_s + other.gpu_s)


class Bench(ABC):
    """What can be timed in a worker process.

    Pickled by the parent and opened in the worker, so it holds plain values until :meth:`open`.
    """

    counts: BenchCounts

    @abstractmethod
    def open(self) -> BenchFacts:
        """Takes the GPU. An exception here means that there is no device."""

    @abstractmethod
    def prepare(self, cell: Cell) -> None:
        """Makes operands and reference of a cell. Idempotent, and cheap the second time."""

    @abstractmethod
    def check(self, job: Job) -> Checked:
        """Launches once and compares with the reference.

        The relative error is returned as it is; the worker judges it.

        Raises:
            BenchError: The config cannot run.
        """

    @abstractmethod
    def round(self) -> float:
        """Microseconds per launch of one more round of the job checked last."""

    def finish(self) -> None:
        """Drops the job checked last."""

    def alive(self) -> None:
        """Raises whatever it likes where the GPU's context is lost."""
