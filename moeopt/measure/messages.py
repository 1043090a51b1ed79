"""Messages between a GPU worker process and its supervisor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeopt.core.trial import Cell, Failure, Job
from moeopt.measure.bench import BenchCounts, BenchFacts, Checked

# -- to the worker ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """Times a job.

    Attributes:
        number: Unique in a supervisor's life.
        job: What to time.
        raced: Whether to wait for a :class:`Verdict` after each round.
    """

    number: int
    job: Job
    raced: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The race's answer to a :class:`Round`: whether the task ends here."""

    stop: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drops all tasks: nobody waits for them any more."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Makes operands and references of cells while there is nothing else to do."""

    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Calls a function of a module with the bench; answered by an :class:`Answer`."""

    question: Callable[[Any], Any]


Request = Task | Verdict | Cancel | Prepare | Ask


# -- from the worker --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """The bench is open: always the first message, or else :class:`Refused` is."""

    facts: BenchFacts


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no device: one line that says why."""

    line: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What an :class:`Ask` came to.

    Attributes:
        value: The function's result.
        error: One line, where it raised.
    """

    value: Any = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """The operands of a task are there: from here on a crash is the config's."""

    number: int


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a task's config is right."""

    number: int
    checked: Checked


@dataclass(frozen=True, slots=True)
class Round:
    """Microseconds per launch of one round of a task that is raced."""

    number: int
    us: float


@dataclass(frozen=True, slots=True)
class Done:
    """Microseconds per launch of all rounds of a task, and the worker's counts so far."""

    number: int
    us: tuple[float, ...]
    counts: BenchCounts


@dataclass(frozen=True, slots=True)
class Failed:
    """A task has no time.

    Attributes:
        number: The task's.
        failure: Why.
        lost: Whether the GPU's context is lost, and the process at its end with it.
        counts: The worker's counts so far.
    """

    number: int
    failure: Failure
    lost: bool
    counts: BenchCounts


Reply = Opened | Refused | Answer | Begun | Passed | Round | Done | Failed
