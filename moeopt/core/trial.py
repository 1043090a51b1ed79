"""Trials: what is asked of a device, and what it answers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role

# The words of the auto-tuning field's shared results format for why a config has no time.
Reason = Literal["constraints", "compile", "runtime", "correctness", "timeout"]


# Relative Frobenius error over which a result is wrong: bf16 rounding alone gives 0.0017.
MAX_RELATIVE_ERROR: Final = 1e-2

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
    """Never stops a job."""
    return False


Mode = Literal["split", "joint"]
