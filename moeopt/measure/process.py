"""Worker process as the parent sees it: start it, talk to it, kill it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from moeopt.errors import DeviceError
from moeopt.measure.bench import Bench
from moeopt.measure.messages import Reply, Request
from moeopt.measure.worker import EXIT_LOST

_LOG_TAIL_BYTES: Final = 4096


class WorkerDiedError(Exception):
    """The worker process ended; the message is one line with its exit status or signal."""


class WorkerSilentError(Exception):
    """The worker process did not answer in time."""


class WorkerProcess:
    """A running worker.

    It is a session of its own, so Ctrl-C reaches the parent alone, and it holds the read end of a
    pipe that ends with the parent: ``kill -9`` of the parent leaves no child.

    Args:
        bench: Sent to the process, which opens it.
        log_path: Where its stdout and stderr go.
        environment: Variables to set in it.

    Raises:
        DeviceError: The process could not be started.
    """

    def __init__(self, bench: Bench, log_path: Path, environment: Mapping[str, str] | None = None) -> None:
        payload = pickle.dumps(bench)
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        by_signal = threading.current_thread() is threading.main_thread()
        try:
            with log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable, "-m", "moeopt.measure.worker",
                        str(theirs.fileno()), str(lifeline_read), str(int(by_signal)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), lifeline_read),
                    start_new_session=True,
                    env={**os.environ, **(environment or {}), "PYTHONPATH": _python_path()},
                )  # fmt: skip
        except OSError as error:
            os.close(self._lifeline)
            ours.close()
            raise DeviceError(f"the GPU worker could not be started: {error}") from None
        finally:
            theirs.close()
            os.close(lifeline_read)
        self.conn = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _end, self._process, self.conn, self._lifeline)
        try:
            self.conn.send_bytes(payload)
        except OSError:
            raise DeviceError(f"the GPU worker ended at once: {self.log_tail()}") from None

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def send(self, message: Request) -> None:
        """Sends one message.

        Raises:
            WorkerDiedError: Nobody is there to read it.
        """
        try:
            self.conn.send(message)
        except OSError:
            raise WorkerDiedError(self.exit_reason()) from None

    def receive(self, timeout: float) -> Reply:
        """The next message.

        Raises:
            WorkerSilentError: None came within ``timeout`` seconds.
            WorkerDiedError: The process is gone.
        """
        try:
            if not self.conn.poll(max(0.0, timeout)):
                raise WorkerSilentError
            message: Reply = self.conn.recv()
        except (EOFError, OSError):
            raise WorkerDiedError(self.exit_reason()) from None
        return message

    def exit_reason(self) -> str:
        """One line on how the process ended."""
        try:
            status = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-status).name}"
            return f"was ended by signal {-status}"
        if status == EXIT_LOST:
            return "lost its CUDA context"
        return f"ended with exit status {status}"

    def log_tail(self) -> str:
        """The last line that the process printed, or how it ended."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - _LOG_TAIL_BYTES))
                lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return lines[-1] if lines else self.exit_reason()

    def kill(self) -> None:
        """Ends the process now. May be called more than once."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes], conn: Connection, lifeline: int) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.close(lifeline)
    conn.close()
    deadline = time.monotonic() + 2.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def _python_path() -> str:
    """The parent's import path, so that the worker finds the same moeopt (and the caller's bench)."""
    return os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
