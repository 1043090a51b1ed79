"""Keeps a worker process fed and alive, whatever the configs do to it.

A config that crashes the process, hangs it, or leaves a CUDA error that sticks has failed; the
process is started again and what else had been asked for is repeated.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Failure, Race, Reason
from moeopt.errors import DeviceError
from moeopt.measure.process import WorkerDiedError, WorkerProcess, WorkerSilentError
from moeopt.measure.worker import Bench, BenchCounts, Task

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task.

    Attributes:
        task: What was asked.
        us: Microseconds per launch of each round.
        relative_error: Against the reference, or None where it came to no result.
        raced_out: Whether the race ended it.
        failure: Why there is no time.
        extra: The bench's facts.
    """

    task: Task
    us: tuple[float, ...] = ()
    relative_error: float | None = None
    raced_out: bool = False
    failure: Failure | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


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
    task: Task
    barred: bool = False
    begun: bool = False
    relative_error: float | None = None
    us: list[float] = field(default_factory=list)
    stopped: bool = False
    repeats: int = 0


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
        self._facts: dict[str, Any] | None = None
        self._cells: list[Cell] = []
        self._strikes: defaultdict[LaunchConfig, list[Reason]] = defaultdict(list)
        self._checks: list[float] = []
        self._live_counts = BenchCounts()
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
                self._process.send("prepare", self._cells)

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if one runs."""
        return self._process.pid if self._process is not None else None

    def facts(self) -> dict[str, Any]:
        """What the bench says of itself; waits until the worker is up.

        Raises:
            DeviceError: It refuses, or cannot start.
        """
        while self._facts is None:
            self.start()
            try:
                self._handle(self._receive(self.deadlines.start))
            except WorkerDiedError as died:
                self._died_at_start(str(died))
            except WorkerSilentError:
                self._drop()
                raise DeviceError(
                    f"the GPU worker did not start within {self.deadlines.start:g} s: its output is in {self.log_path}"
                ) from None
        return self._facts

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Has operands and references of these cells made while the worker has nothing else to do."""
        self._cells = list(cells)
        if self._process is not None:
            with contextlib.suppress(WorkerDiedError):
                self._process.send("prepare", self._cells)

    def ask(self, question: str) -> Any:
        """Asks the bench. Not while :meth:`run` is under way.

        Raises:
            DeviceError: It has no answer.
        """
        self.facts()
        process = self._process
        assert process is not None
        try:
            process.send("ask", question)
            while True:
                message = self._receive(self.deadlines.prepare)
                if message[0] in ("answer", "error") and message[1] == question:
                    break
        except (WorkerDiedError, WorkerSilentError) as error:
            self._drop()
            raise DeviceError(f"the GPU worker did not answer {question!r}: {error or 'it was silent'}") from None
        if message[0] == "error":
            raise DeviceError(f"the GPU worker could not answer {question!r}: {message[2]}")
        return message[2]

    def close(self) -> None:
        """Ends the worker. May be called more than once."""
        self._closed = True
        self._drop()
        if not self._log_named:
            self.log_path.unlink(missing_ok=True)

    def totals(self) -> BenchCounts:
        """Counts of all workers together, up to the last finished task."""
        done, live = self.counts.bench, self._live_counts
        return BenchCounts(done.compiled + live.compiled, done.loaded + live.loaded, done.gpu_s + live.gpu_s)

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
            self._facts = None
            self.counts.bench = self.totals()
            self._live_counts = BenchCounts()

    def _died_at_start(self, how: str) -> None:
        words = self._process.log_tail() if self._process is not None else ""
        self._drop()
        self._start_deaths += 1
        self._log_named = True
        if self._start_deaths >= _MAX_START_DEATHS:
            raise DeviceError(f"the GPU worker {how} at its start, {self._start_deaths} times in a row: {words}")

    def _receive(self, timeout: float) -> tuple[Any, ...]:
        assert self._process is not None
        return self._process.receive(timeout)

    def _handle(self, message: tuple[Any, ...]) -> None:
        """Messages that belong to no task."""
        if message[0] == "hello":
            self._facts = message[1]
            self._start_deaths = 0
        elif message[0] == "refused":
            self._drop()
            raise DeviceError(message[1])

    # -- tasks ----------------------------------------------------------------------------------

    def run(self, take: Callable[[], Task | None], race: Race) -> Iterator[Outcome]:
        """Works tasks off in the order in which ``take`` hands them out, until it returns None.

        Args:
            take: The next task, or None where there is none at present. Called ahead of need.
            race: Called after each round of a task that races.

        Raises:
            DeviceError: The worker cannot be kept alive.
        """
        flights: deque[_Flight] = deque()
        try:
            self._top_up(flights, take)
            while flights:
                outcome = self._first(flights, race)
                self._top_up(flights, take)
                yield outcome
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
                self._process.send("cancel")
            except WorkerDiedError:
                self._drop()

    def _top_up(self, flights: deque[_Flight], take: Callable[[], Task | None]) -> None:
        while len(flights) < DEPTH:
            task = take()
            if task is None:
                return
            flight = _Flight(task)
            flights.append(flight)
            self._post(flight)

    def _post(self, flight: _Flight) -> None:
        flight.barred = len(self._strikes.get(flight.task.job.config, ())) >= STRIKES
        if flight.barred:
            return
        self.start()
        assert self._process is not None
        # A dead worker shows when its messages are read.
        with contextlib.suppress(WorkerDiedError):
            self._process.send("task", flight.task)

    def _first(self, flights: deque[_Flight], race: Race) -> Outcome:
        """Sees the first flight through to its end."""
        while True:
            flight = flights[0]
            if flight.barred:
                flights.popleft()
                return self._barred(flight)
            try:
                outcome = self._follow(flight, race)
            except WorkerSilentError:
                outcome = self._hung(flight)
            except WorkerDiedError as died:
                outcome = self._crashed(flight, str(died))
            if outcome is None:  # not its fault: once more
                self._repost(flights)
                continue
            flights.popleft()
            if self._process is None:
                self._repost(flights)
            return outcome

    def _repost(self, flights: deque[_Flight]) -> None:
        for flight in flights:
            flight.begun, flight.relative_error, flight.us, flight.stopped = False, None, [], False
            self._post(flight)

    def _follow(self, flight: _Flight, race: Race) -> Outcome | None:
        limits = self.deadlines
        limit = limits.prepare if self._facts is not None else limits.start
        task = flight.task
        begun_at = 0.0
        while True:
            message = self._receive(limit)
            kind = message[0]
            if kind in ("hello", "refused"):
                self._handle(message)
                limit = limits.prepare
                continue
            if kind in ("answer", "error") or message[1] != task.number:
                continue  # of a task that was cancelled
            if kind == "begun":
                flight.begun = True
                begun_at = time.monotonic()
                limit = self._check_limit()
            elif kind == "checked":
                self._checks.append(time.monotonic() - begun_at)
                flight.relative_error = message[2]
                limit = max(limits.floor, limits.factor * message[3])
            elif kind == "round":
                flight.us.append(message[2])
                flight.stopped = race(task.job, tuple(flight.us))
                assert self._process is not None
                self._process.send("stop" if flight.stopped else "go")
            elif kind == "done":
                self._live_counts = message[4]
                return Outcome(task, message[2], flight.relative_error, flight.stopped, extra=message[3])
            elif kind == "failed":
                _, _, reason, line, lost, self._live_counts = message
                if lost:
                    self._strikes[task.job.config].append(reason)
                    self.counts.restarts["sticky"] += 1
                    self._log_named = True
                    self._drop()
                    line = f"{line}; the CUDA context was lost, the GPU worker is started again"
                return Outcome(task, failure=Failure(reason, line, str(self.log_path) if lost else None))

    def _check_limit(self) -> float:
        limits = self.deadlines
        if len(self._checks) < 2 * DEPTH:
            return max(limits.first_check, limits.floor)
        return max(limits.floor, min(limits.first_check, limits.factor * max(self._checks[-100:])))

    def _hung(self, flight: _Flight) -> Outcome | None:
        config = flight.task.job.config
        stage = "in its first launch" if flight.relative_error is None else "while it was timed"
        if not flight.begun:
            return self._not_begun(flight, "was silent while it made the operands", "timeout")
        self._strikes[config].append("timeout")
        self.counts.restarts["hang"] += 1
        self._log_named = True
        log.warning("%s hung %s: the GPU worker is killed and started again", config, stage)
        self._drop()
        return Outcome(
            flight.task, failure=Failure("timeout", f"hung {stage}: killed by its deadline", str(self.log_path))
        )

    def _crashed(self, flight: _Flight, how: str) -> Outcome | None:
        config = flight.task.job.config
        if not flight.begun:
            return self._not_begun(flight, how, "runtime")
        if signal.SIGKILL.name in how and flight.repeats == 0:
            # We did not do it and a kernel cannot: the kernel's memory killer, or a person.
            flight.repeats += 1
            self.counts.restarts["killed"] += 1
            log.warning("the GPU worker was killed from outside at %s: it is started again", config)
            self._drop()
            return None
        self._strikes[config].append("runtime")
        self.counts.restarts["crash"] += 1
        self._log_named = True
        self._drop()
        return Outcome(flight.task, failure=Failure("runtime", f"the GPU worker {how}", str(self.log_path)))

    def _not_begun(self, flight: _Flight, how: str, kind: str) -> Outcome | None:
        """The worker ended before it touched the config: not the config's fault, so it is tried again."""
        self.counts.restarts["hang" if kind == "timeout" else "crash"] += 1
        log.warning("the GPU worker %s before %s: it is started again", how, flight.task.job.config)
        if self._facts is None:
            self._died_at_start(how)
            return None
        self._drop()
        flight.repeats += 1
        self._log_named = True
        if flight.repeats >= _MAX_START_DEATHS:
            raise DeviceError(
                f"the GPU worker {how} before {flight.task.job.config} of {flight.task.job.cell.role} "
                f"M={flight.task.job.cell.batch_size} was launched, {flight.repeats} times: see {self.log_path}"
            )
        return None

    def _barred(self, flight: _Flight) -> Outcome:
        strikes = self._strikes[flight.task.job.config]
        message = f"not launched: it ended the GPU worker {len(strikes)} times before"
        return Outcome(flight.task, failure=Failure(strikes[-1], message, str(self.log_path)))
