"""What runs in a GPU worker process: one bench, and the loop that answers the supervisor.

The process is started as ``python -m moeopt.measure.worker`` with two pipe ends. It ends by itself
when its parent is gone. What goes wrong inside becomes a message with a reason; what kills the
process is seen by the supervisor as the end of the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import signal
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from moeopt.core.trial import Cell, Job, Reason
from moeopt.errors import MoeoptError

# A result that is further from the reference (relative Frobenius error) is wrong.
MAX_RELATIVE_ERROR: Final = 1e-2
MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 5
# Rounds end when two standard errors of their median are within this share of it.
SETTLED: Final = 0.005
# Exit status of a worker whose GPU context is lost, and of one whose parent is gone.
EXIT_LOST: Final = 70
EXIT_ORPHAN: Final = 71
_LONGEST_MESSAGE: Final = 300


class BenchError(Exception):
    """Why a config has no time, where the bench knows the reason.

    Attributes:
        reason: One of the field's words.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Task:
    """One job for the worker.

    Attributes:
        number: Unique in a supervisor's life.
        job: What to time.
        race: Whether to ask for leave after each round.
        rounds: Most rounds.
    """

    number: int
    job: Job
    race: bool = True
    rounds: int = MAX_ROUNDS


@dataclass(frozen=True, slots=True)
class Checked:
    """A config whose result is right.

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


class Bench(ABC):
    """What can be timed in a worker process: a GPU, or a fake with faults.

    Pickled by the parent and opened in the worker, so it holds plain values until :meth:`open`.
    """

    counts: BenchCounts

    @abstractmethod
    def open(self) -> dict[str, Any]:
        """Takes the GPU; returns facts about it. An exception here means there is no device."""

    @abstractmethod
    def prepare(self, cell: Cell) -> None:
        """Makes operands and reference of a cell. Idempotent, and cheap the second time."""

    @abstractmethod
    def check(self, job: Job) -> Checked:
        """Launches once and compares with the reference.

        The relative error is returned as it is; the loop judges it.

        Raises:
            BenchError: The config cannot run.
        """

    @abstractmethod
    def round(self) -> float:
        """Microseconds per launch of one more round of the job checked last."""

    def finish(self) -> dict[str, Any]:
        """Drops the job checked last; returns facts to keep with its measurement."""
        return {}

    def alive(self) -> None:
        """Raises whatever it likes where the GPU's context is lost."""

    def ask(self, question: str) -> Any:
        """Answers a question of the parent's, such as the GPU's measured rates."""
        raise BenchError("runtime", f"unknown question {question!r}")


def settled(us: Sequence[float]) -> bool:
    """Whether rounds agree so well that more would tell nothing.

    Two standard errors of the median, taken from the sample's deviation (times 1.2533, the normal
    distribution's factor for a median), within :data:`SETTLED` of it.
    """
    if len(us) < MIN_ROUNDS:
        return False
    error = 1.2533 * statistics.stdev(us) / math.sqrt(len(us))
    return 2 * error <= SETTLED * statistics.median(us)


def one_line(error: BaseException) -> str:
    """An exception as one line of bounded length; one of ours is a sentence without its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and isinstance(error, MoeoptError | BenchError):
        text = lines[0]
    else:
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"


class _CancelledError(Exception):
    """The parent lost interest in the task at hand."""


@dataclass
class WorkerLoop:
    """Reads messages, answers them, and prepares cells while nobody asks for anything.

    Messages from the parent: ``("task", Task)``, ``("prepare", [Cell])``, ``("ask", str)``,
    ``("go",)``, ``("stop",)``, ``("cancel",)``, ``("exit",)``. To the parent: ``("hello", facts)``,
    ``("refused", line)``, ``("begun", n)``, ``("checked", n, relative_error, expected_s)``,
    ``("round", n, µs)``, ``("done", n, µs, extra, counts)``, ``("failed", n, reason, line, lost, counts)``,
    ``("answer", question, value)``, ``("error", question, line)``.
    """

    bench: Bench
    conn: Connection
    _waiting: deque[tuple[Any, ...]] = field(default_factory=deque)
    _idle_cells: deque[Cell] = field(default_factory=deque)

    def run(self) -> None:
        """Opens the bench and works until told to exit or the pipe ends."""
        try:
            facts = self.bench.open()
        except Exception as error:  # noqa: BLE001  (the border of the process: it becomes a message)
            self.conn.send(("refused", str(error) if isinstance(error, BenchError) else one_line(error)))
            return
        self.conn.send(("hello", facts))
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while self._step():
                pass

    def _step(self) -> bool:
        if not self._waiting and self._idle_cells and not self.conn.poll(0):
            cell = self._idle_cells.popleft()
            # What fails here fails again, and is reported, when a job needs it.
            with contextlib.suppress(Exception):
                self.bench.prepare(cell)
            return True
        message = self._waiting.popleft() if self._waiting else self.conn.recv()
        kind = message[0]
        if kind == "task":
            self._task(message[1])
        elif kind == "prepare":
            self._idle_cells.extend(message[1])
        elif kind == "ask":
            self._answer(message[1])
        return bool(kind != "exit")

    def _answer(self, question: str) -> None:
        try:
            value = self.bench.ask(question)
        except Exception as error:  # noqa: BLE001  (the border of the process: it becomes a message)
            self.conn.send(("error", question, one_line(error)))
        else:
            self.conn.send(("answer", question, value))

    def _task(self, task: Task) -> None:
        number = task.number
        try:
            self.bench.prepare(task.job.cell)
            self.conn.send(("begun", number))
            us = self._rounds(task)
            extra = self.bench.finish()
        except _CancelledError:
            self.bench.finish()
            return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001  (the border of the process: it becomes a message)
            self._failed(number, error)
        else:
            self.conn.send(("done", number, us, extra, self.bench.counts))

    def _rounds(self, task: Task) -> tuple[float, ...]:
        checked = self.bench.check(task.job)
        error = checked.relative_error
        # Written so that NaN fails.
        if not error <= MAX_RELATIVE_ERROR:
            raise BenchError(
                "correctness",
                f"the result is wrong: its relative error is {error:.3g}, and {MAX_RELATIVE_ERROR:g} is allowed",
            )
        self.conn.send(("checked", task.number, error, checked.expected_s))
        us: list[float] = []
        while True:
            us.append(self.bench.round())
            if task.race:
                self.conn.send(("round", task.number, us[-1]))
                if not self._verdict():
                    break
            if len(us) >= task.rounds or settled(us):
                break
        return tuple(us)

    def _verdict(self) -> bool:
        while True:
            message = self.conn.recv()
            if message[0] in ("go", "stop"):
                return bool(message[0] == "go")
            if message[0] == "cancel":
                self._waiting = deque(m for m in self._waiting if m[0] != "task")
                raise _CancelledError
            self._waiting.append(message)

    def _failed(self, number: int, error: Exception) -> None:
        reason: Reason = error.reason if isinstance(error, BenchError) else "runtime"
        line = one_line(error)
        print(f"task {number}: {reason}: {line}", file=sys.stderr, flush=True)  # noqa: T201  (stderr is the log)
        try:
            self.bench.finish()
            self.bench.alive()
        except Exception as lost:  # noqa: BLE001  (the border of the process: it becomes a message)
            print(f"the GPU context is lost: {lost}", file=sys.stderr, flush=True)  # noqa: T201
            self.conn.send(("failed", number, reason, line, True, self.bench.counts))
            # Destructors would call into the lost context.
            os._exit(EXIT_LOST)
        self.conn.send(("failed", number, reason, line, False, self.bench.counts))


def die_with_parent(lifeline: int, *, by_signal: bool) -> None:
    """Ends this process when the parent does, also after ``kill -9``.

    Args:
        lifeline: Read end of a pipe whose other end only the parent holds.
        by_signal: Also ask the kernel for SIGKILL. It comes when the parent's *thread* that started
            this process ends, so this is for workers that were started in a main thread.
    """

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(EXIT_ORPHAN)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    if by_signal and sys.platform == "linux":
        pr_set_pdeathsig = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    """Entry of the process: ``worker CONNECTION_FD LIFELINE_FD BY_SIGNAL``."""
    conn_fd, lifeline, by_signal = (int(value) for value in sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(lifeline, by_signal=bool(by_signal))
    conn = Connection(conn_fd)
    bench: Bench = pickle.loads(conn.recv_bytes())
    start = time.monotonic()
    WorkerLoop(bench, conn).run()
    print(f"worker ends after {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)  # noqa: T201
    sys.stderr.flush()
    # Tearing a CUDA context down takes a second that nobody needs.
    os._exit(0)


if __name__ == "__main__":
    # Under this name so that pickled classes of this module are the same classes here.
    from moeopt.measure import worker

    worker.main()
