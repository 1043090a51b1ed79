"""GPU worker process: one bench, and the loop that answers the supervisor.

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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

from moeopt.core.trial import MAX_RELATIVE_ERROR, Cell, Failure
from moeopt.errors import MoeoptError
from moeopt.measure.bench import Bench, BenchError
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
    Request,
    Round,
    Task,
    Verdict,
)

MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 5
# Rounds end when two standard errors of their median are within this share of it.
SETTLED: Final = 0.005
# Exit status of a worker whose GPU context is lost, and of one whose parent is gone.
EXIT_LOST: Final = 70
EXIT_ORPHAN: Final = 71
_LONGEST_MESSAGE: Final = 300


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
    """Answers messages, and prepares cells while nobody asks for anything."""

    bench: Bench
    conn: Connection
    _waiting: deque[Request] = field(default_factory=deque)
    _idle_cells: deque[Cell] = field(default_factory=deque)

    def run(self) -> None:
        """Opens the bench and works until the pipe ends."""
        try:
            facts = self.bench.open()
        except Exception as error:  # noqa: BLE001  (the border of the process: it becomes a message)
            self._send(Refused(str(error) if isinstance(error, BenchError) else one_line(error)))
            return
        self._send(Opened(facts))
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                self._step()

    def _send(self, message: Reply) -> None:
        self.conn.send(message)

    def _receive(self) -> Request:
        message: Request = self.conn.recv()
        return message

    def _step(self) -> None:
        if not self._waiting and self._idle_cells and not self.conn.poll(0):
            cell = self._idle_cells.popleft()
            # What fails here fails again, and is reported, when a job needs it.
            with contextlib.suppress(Exception):
                self.bench.prepare(cell)
            return
        match self._waiting.popleft() if self._waiting else self._receive():
            case Task() as task:
                self._task(task)
            case Prepare(cells):
                self._idle_cells.extend(cells)
            case Ask() as ask:
                self._answer(ask)
            case Verdict() | Cancel():
                pass  # of a task that has ended

    def _answer(self, ask: Ask) -> None:
        try:
            answer = Answer(ask.question(self.bench))
        except Exception as error:  # noqa: BLE001  (the border of the process: it becomes a message)
            answer = Answer(error=one_line(error))
        self._send(answer)

    def _task(self, task: Task) -> None:
        number = task.number
        try:
            self.bench.prepare(task.job.cell)
            self._send(Begun(number))
            us = self._rounds(task)
            self.bench.finish()
        except _CancelledError:
            self.bench.finish()
            return
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001  (the border of the process: it becomes a message)
            self._failed(number, error)
        else:
            self._send(Done(number, us, self.bench.counts))

    def _rounds(self, task: Task) -> tuple[float, ...]:
        checked = self.bench.check(task.job)
        error = checked.relative_error
        # Written so that NaN fails.
        if not error <= MAX_RELATIVE_ERROR:
            raise BenchError(
                "correctness",
                f"the result is wrong: its relative error is {error:.3g}, and {MAX_RELATIVE_ERROR:g} is allowed",
            )
        self._send(Passed(task.number, checked))
        us: list[float] = []
        while True:
            us.append(self.bench.round())
            if task.raced:
                self._send(Round(task.number, us[-1]))
                if self._verdict().stop:
                    break
            if len(us) >= MAX_ROUNDS or settled(us):
                break
        return tuple(us)

    def _verdict(self) -> Verdict:
        while True:
            match self._receive():
                case Verdict() as verdict:
                    return verdict
                case Cancel():
                    self._waiting = deque(message for message in self._waiting if not isinstance(message, Task))
                    raise _CancelledError
                case message:
                    self._waiting.append(message)

    def _failed(self, number: int, error: Exception) -> None:
        failure = Failure(error.reason if isinstance(error, BenchError) else "runtime", one_line(error))
        _log(f"task {number}: {failure.reason}: {failure.message}")
        try:
            self.bench.finish()
            self.bench.alive()
        except Exception as lost:  # noqa: BLE001  (the border of the process: it becomes a message)
            _log(f"the GPU context is lost: {lost}")
            self._send(Failed(number, failure, True, self.bench.counts))
            # Destructors would call into the lost context.
            os._exit(EXIT_LOST)
        self._send(Failed(number, failure, False, self.bench.counts))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201  (a worker's stderr is its log)


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
    _log(f"worker ends after {time.monotonic() - start:.1f} s")
    # Tearing a CUDA context down takes a second that nobody needs.
    os._exit(0)


if __name__ == "__main__":
    main()
