"""Supervisor of a GPU worker process: keeps it fed and alive, whatever the configs do to it.

A config that crashes the process, hangs it, or leaves a CUDA error that sticks has failed; the
process is started again and what else had been asked for is repeated.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role
from moeopt.core.trial import Cell, Failure, Measurement, Race, Reason, Resources
from moeopt.errors import DeviceError
from moeopt.measure.bench import Bench, BenchCounts, BenchFacts
from moeopt.measure.compile_queue import ReadyJob
from moeopt.measure.messages import (
    Answer,
    Ask,
    Begun,
    Cancel,
    Done,
    Failed,
    Opened,
    Passed,
    Prepare,
    Refused,
    Reply,
    Round,
    Task,
    Verdict,
)
from moeopt.measure.process import WorkerDiedError, WorkerProcess, WorkerSilentError

T = TypeVar("T")
log = logging.getLogger(__name__)

# Tasks in the worker's hands: the one it works on, and the next, so that it never waits for us.
DEPTH: Final = 2
# A config that ended the worker so often is not launched again.
STRIKES: Final = 2
_MAX_START_DEATHS: Final = 3


@dataclass(frozen=True)
class Deadlines:
    """Seconds the worker may be silent.

    Attributes:
        start: From its start until it has the GPU.
        prepare: While it makes the operands of a cell.
        first_check: For a checked launch, until a few have been seen.
        floor: The least for a checked launch or a round; a launch gets ``factor`` times the slowest
            seen, a round ``factor`` times what its checked launch took.
        factor: See there.
    """

    start: float = 180.0
    prepare: float = 120.0
    first_check: float = 30.0
    floor: float = 5.0
    factor: float = 20.0


@dataclass
class SupervisorCounts:
    """What a supervisor has seen so far.

    Attributes:
        starts: Worker processes started.
        restarts: Why the later ones were needed: ``crash``, ``sticky``, ``hang``, ``killed``.
        bench: The sum of all workers' counts.
    """

    starts: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    bench: BenchCounts = field(default_factory=BenchCounts)


@dataclass
class _Flight:
    """A task in the worker's hands, and how far it has come there."""

    task: Task
    resources: dict[Role, Resources]
    repeats: int = 0
    begun: bool = False
    relative_error: float | None = None
    us: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def config(self) -> LaunchConfig:
        return self.task.job.config

    def afresh(self) -> _Flight:
        """The same task, for another worker."""
        return _Flight(self.task, self.resources, self.repeats)

    def timed(self, us: tuple[float, ...]) -> Measurement:
        return Measurement(
            self.task.job,
            "raced_out" if self.stopped else "ok",
            us=us,
            relative_error=self.relative_error,
            resources=self.resources,
        )

    def failed(self, reason: Reason, message: str, log_path: Path | None) -> Measurement:
        failure = Failure(reason, message, str(log_path) if log_path else None)
        return Measurement(self.task.job, "failed", resources=self.resources, failure=failure)


class Supervisor:
    """Owns the worker process of one GPU.

    Args:
        bench: What the worker opens.
        log_path: The worker's output.
        deadlines: How long it may be silent.
        environment: Variables to set in it.
    """

    def __init__(
        self,
        bench: Bench,
        log_path: Path,
        *,
        deadlines: Deadlines | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.bench = bench
        self.log_path = log_path
        self.deadlines = deadlines or Deadlines()
        self.counts = SupervisorCounts()
        self._environment = environment
        self._process: WorkerProcess | None = None
        self._facts: BenchFacts | None = None
        self._cells: tuple[Cell, ...] = ()
        self._strikes: defaultdict[LaunchConfig, list[Reason]] = defaultdict(list)
        self._checks: list[float] = []
        self._live_counts = BenchCounts()
        self._numbers = itertools.count(1)
        self._start_deaths = 0
        self._log_named = False
        self._closed = False

    # -- the process ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the worker without waiting for it."""
        if self._closed:
            raise DeviceError("the device is closed: open a new one")
        if self._process is None:
            self._facts = None
            self.counts.starts += 1
            self._process = WorkerProcess(self.bench, self.log_path, self._environment)
            if self._cells:
                self._process.send(Prepare(self._cells))

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if one runs."""
        return self._process.pid if self._process is not None else None

    def facts(self) -> BenchFacts:
        """What the bench says of itself; waits until the worker is up.

        Raises:
            DeviceError: It refuses, or cannot start.
        """
        while self._facts is None:
            self.start()
            try:
                self._receive(self.deadlines.start)
            except WorkerDiedError as died:
                self._died_at_start(str(died))
            except WorkerSilentError:
                self._drop()
                raise DeviceError(
                    f"the GPU worker did not start within {self.deadlines.start:g} s: its output is in {self.log_path}"
                ) from None
        return self._facts

    def prepare(self, cells: Iterable[Cell]) -> None:
        """Has operands and references of these cells made while the worker has nothing else to do."""
        self._cells = tuple(cells)
        if self._process is not None:
            with contextlib.suppress(WorkerDiedError):
                self._process.send(Prepare(self._cells))

    def ask(self, question: Callable[[Any], T]) -> T:
        """Calls a function with the bench, in the worker. Not while :meth:`run` is under way.

        Args:
            question: Of a module, so that it can be pickled, and so can what it returns.

        Raises:
            DeviceError: It has no answer.
        """
        self.facts()
        process = self._process
        assert process is not None
        name = question.__name__
        answer: Reply | None = None
        try:
            process.send(Ask(question))
            while not isinstance(answer, Answer):
                answer = self._receive(self.deadlines.prepare)
        except (WorkerDiedError, WorkerSilentError) as error:
            self._drop()
            raise DeviceError(f"the GPU worker did not answer {name!r}: {error or 'it was silent'}") from None
        if answer.error is not None:
            raise DeviceError(f"the GPU worker could not answer {name!r}: {answer.error}")
        value: T = answer.value
        return value

    def close(self) -> None:
        """Ends the worker. May be called more than once."""
        self._closed = True
        self._drop()
        if not self._log_named:
            self.log_path.unlink(missing_ok=True)

    def totals(self) -> BenchCounts:
        """Counts of all workers together, up to the last finished task."""
        return self.counts.bench + self._live_counts

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
            self._facts = None
            self.counts.bench = self.totals()
            self._live_counts = BenchCounts()

    def _died_at_start(self, how: str) -> None:
        tail = self._process.log_tail() if self._process is not None else ""
        self._drop()
        self._start_deaths += 1
        self._log_named = True
        if self._start_deaths >= _MAX_START_DEATHS:
            raise DeviceError(f"the GPU worker {how} at its start, {self._start_deaths} times in a row: {tail}")

    def _receive(self, timeout: float) -> Reply:
        """The next message; what it says of the worker itself is taken note of."""
        assert self._process is not None
        message = self._process.receive(timeout)
        match message:
            case Opened(facts):
                self._facts = facts
                self._start_deaths = 0
            case Refused(line):
                self._drop()
                raise DeviceError(line)
            case Done(counts=counts) | Failed(counts=counts):
                self._live_counts = counts
        return message

    # -- tasks ----------------------------------------------------------------------------------

    def run(self, take: Callable[[], ReadyJob | None], race: Race | None) -> Iterator[Measurement]:
        """Times jobs in the order in which ``take`` hands them out, until it returns None.

        Args:
            take: The next job, or None where there is none at present. Called ahead of need.
            race: Called after each round; None to time in full.

        Raises:
            DeviceError: The worker cannot be kept alive.
        """
        flights: deque[_Flight] = deque()
        try:
            self._top_up(flights, take, race)
            while flights:
                measurement = self._first(flights, race)
                self._top_up(flights, take, race)
                yield measurement
        except GeneratorExit:
            self._cancel()
            raise
        except BaseException:
            # The pipe may hold half a message.
            self._drop()
            raise

    def _cancel(self) -> None:
        if self._process is not None:
            try:
                self._process.send(Cancel())
            except WorkerDiedError:
                self._drop()

    def _top_up(self, flights: deque[_Flight], take: Callable[[], ReadyJob | None], race: Race | None) -> None:
        while len(flights) < DEPTH:
            ready = take()
            if ready is None:
                return
            task = Task(next(self._numbers), ready.job, raced=race is not None)
            flights.append(_Flight(task, ready.resources))
            self._post(flights[-1])

    def _post(self, flight: _Flight) -> None:
        if self._struck_out(flight.config):
            return
        self.start()
        assert self._process is not None
        # A dead worker shows when its messages are read.
        with contextlib.suppress(WorkerDiedError):
            self._process.send(flight.task)

    def _repost(self, flights: deque[_Flight]) -> None:
        for _ in range(len(flights)):
            flights.append(flights.popleft().afresh())
            self._post(flights[-1])

    def _struck_out(self, config: LaunchConfig) -> bool:
        return len(self._strikes.get(config, ())) >= STRIKES

    def _first(self, flights: deque[_Flight], race: Race | None) -> Measurement:
        """Sees the first flight through to its end."""
        while True:
            flight = flights[0]
            if self._struck_out(flight.config):
                flights.popleft()
                strikes = self._strikes[flight.config]
                message = f"not launched: it ended the GPU worker {len(strikes)} times before"
                return flight.failed(strikes[-1], message, self.log_path)
            measurement: Measurement | None = None
            try:
                measurement = self._follow(flight, race)
            except WorkerSilentError:
                measurement = self._hung(flight)
            except WorkerDiedError as died:
                measurement = self._crashed(flight, str(died))
            if measurement is None:  # not its fault: once more
                self._repost(flights)
                continue
            flights.popleft()
            if self._process is None:
                self._repost(flights)
            return measurement

    def _follow(self, flight: _Flight, race: Race | None) -> Measurement:
        """Reads the worker's messages until the task is done or failed."""
        limits = self.deadlines
        limit = limits.prepare if self._facts is not None else limits.start
        begun_at = 0.0
        while True:
            message = self._receive(limit)
            if isinstance(message, Opened | Refused):
                limit = limits.prepare
                continue
            if isinstance(message, Answer) or message.number != flight.task.number:
                continue  # of a task that was cancelled
            match message:
                case Begun():
                    flight.begun = True
                    begun_at = time.monotonic()
                    limit = self._check_limit()
                case Passed(checked=checked):
                    self._checks.append(time.monotonic() - begun_at)
                    flight.relative_error = checked.relative_error
                    limit = max(limits.floor, limits.factor * checked.expected_s)
                case Round(us=us):
                    assert race is not None and self._process is not None
                    flight.us.append(us)
                    flight.stopped = race(flight.task.job, tuple(flight.us))
                    self._process.send(Verdict(flight.stopped))
                case Done(us=rounds):
                    return flight.timed(rounds)
                case Failed(failure=failure, lost=False):
                    return flight.failed(failure.reason, failure.message, None)
                case Failed(failure=failure):
                    line = f"{failure.message}; the CUDA context was lost, the GPU worker is started again"
                    return self._ended(flight, "sticky", failure.reason, line)

    def _check_limit(self) -> float:
        limits = self.deadlines
        if len(self._checks) < 2 * DEPTH:
            return max(limits.first_check, limits.floor)
        return max(limits.floor, min(limits.first_check, limits.factor * max(self._checks[-100:])))

    def _ended(self, flight: _Flight, restart: str, reason: Reason, message: str) -> Measurement:
        """The config ended the worker."""
        self._strikes[flight.config].append(reason)
        self._restarted(restart)
        return flight.failed(reason, message, self.log_path)

    def _restarted(self, why: str) -> None:
        """Drops the worker; the next task starts another."""
        self.counts.restarts[why] += 1
        self._log_named = True
        self._drop()

    def _hung(self, flight: _Flight) -> Measurement | None:
        stage = "in its first launch" if flight.relative_error is None else "while it was timed"
        if not flight.begun:
            self._not_begun(flight, "was silent while it made the operands", "hang")
            return None
        log.warning("%s hung %s: the GPU worker is killed and started again", flight.config, stage)
        return self._ended(flight, "hang", "timeout", f"hung {stage}: killed by its deadline")

    def _crashed(self, flight: _Flight, how: str) -> Measurement | None:
        if not flight.begun:
            self._not_begun(flight, how, "crash")
            return None
        if signal.SIGKILL.name in how and flight.repeats == 0:
            # We did not do it and a kernel cannot: the kernel's memory killer, or a person.
            flight.repeats += 1
            log.warning("the GPU worker was killed from outside at %s: it is started again", flight.config)
            self.counts.restarts["killed"] += 1
            self._drop()
            return None
        return self._ended(flight, "crash", "runtime", f"the GPU worker {how}")

    def _not_begun(self, flight: _Flight, how: str, restart: str) -> None:
        """The worker ended before it touched the config: not the config's fault, so it is tried again."""
        log.warning("the GPU worker %s before %s: it is started again", how, flight.config)
        if self._facts is None:
            self.counts.restarts[restart] += 1
            self._died_at_start(how)
            return
        self._restarted(restart)
        flight.repeats += 1
        if flight.repeats >= _MAX_START_DEATHS:
            cell = flight.task.job.cell
            raise DeviceError(
                f"the GPU worker {how} before {flight.config} of {cell.role} M={cell.batch_size} was launched, "
                f"{flight.repeats} times: see {self.log_path}"
            )
