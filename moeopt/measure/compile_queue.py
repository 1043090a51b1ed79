"""Queue of a batch: which jobs are compiled and may be timed, while the rest still compiles."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Protocol

from moeopt.compile.pool import Compiled
from moeopt.compile.rejection import rejection
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import Role
from moeopt.core.trial import Failure, Job, Measurement, Resources
from moeopt.errors import DeviceError


class Compiler(Protocol):
    """What compiles: a :class:`moeopt.compile.CompilePool`, or a stand-in where there is nothing to compile."""

    def submit(self, config: LaunchConfig, role: Role, batch_size: int, *, priority: int = 0) -> Future[Compiled]:
        """Asks for one binary."""

    def close(self) -> None:
        """Ends all processes."""


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """A job that may be launched.

    Attributes:
        job: What to time.
        resources: Of its binaries, per role.
    """

    job: Job
    resources: dict[Role, Resources] = field(default_factory=dict)


@dataclass
class _Pending:
    job: Job
    futures: dict[Role, Future[Compiled]]
    waiting: int
    resources: dict[Role, Resources] = field(default_factory=dict)


class BatchPlan:
    """The jobs of one call of ``measure``, from asked for to ready or answered.

    Args:
        jobs: What was asked for.
        compiler: Gets all of it at once.
        gpu: Its limits decide what is rejected.
        illegal: Why a job cannot run, known without compiling, or None.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        compiler: Compiler,
        gpu: GpuSpec,
        illegal: Callable[[Job], str | None],
    ) -> None:
        self._compiler = compiler
        self._gpu = gpu
        self._done: queue.SimpleQueue[tuple[_Pending, Role]] = queue.SimpleQueue()
        self._pending: dict[int, _Pending] = {}
        self._ready: deque[_Pending] = deque()
        self._answers: list[Measurement] = []
        for job in jobs:
            reason = illegal(job)
            if reason is not None:
                self._answers.append(Measurement(job, "failed", failure=Failure("constraints", reason)))
                continue
            pending = _Pending(job, {}, len(job.cell.roles))
            self._pending[id(pending)] = pending
            for role in job.cell.roles:
                self._submit(pending, role)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to time or to answer."""
        return not self._pending and not self._ready and not self._answers

    @property
    def compiling(self) -> bool:
        """Whether some job still waits for its binary."""
        return bool(self._pending)

    @property
    def ready(self) -> bool:
        """Whether some job may be timed."""
        self._collect(0.0)
        return bool(self._ready)

    def take(self, until: float) -> ReadyJob | None:
        """The next job that may be timed; None where none is ready, or the monotonic clock is past ``until``."""
        if time.monotonic() >= until or not self.ready:
            return None
        pending = self._ready.popleft()
        return ReadyJob(pending.job, pending.resources)

    def answers(self) -> list[Measurement]:
        """Jobs that were answered without a launch since the last call: illegal, failed, rejected."""
        self._collect(0.0)
        answers, self._answers = self._answers, []
        return answers

    def wait(self, timeout: float) -> None:
        """Waits until something was compiled, ``timeout`` seconds at most."""
        if self._pending and not self._ready and not self._answers:
            self._collect(timeout)

    def cancel(self) -> None:
        """Drops what has not begun to compile."""
        for pending in self._pending.values():
            for future in pending.futures.values():
                future.cancel()
        self._pending.clear()
        self._ready.clear()

    def _submit(self, pending: _Pending, role: Role) -> None:
        future = self._compiler.submit(pending.job.config, role, pending.job.cell.batch_size)
        pending.futures[role] = future
        future.add_done_callback(lambda _: self._done.put((pending, role)))

    def _collect(self, timeout: float) -> None:
        while True:
            try:
                pending, role = self._done.get(timeout=timeout) if timeout > 0 else self._done.get_nowait()
            except queue.Empty:
                return
            timeout = 0.0
            if id(pending) in self._pending:
                self._arrived(pending, role)

    def _arrived(self, pending: _Pending, role: Role) -> None:
        try:
            compiled = pending.futures[role].result()
        except CancelledError:
            # Another user of the same compiler dropped it; we still want it.
            self._submit(pending, role)
            return
        except OSError as error:
            raise DeviceError(f"the compile pool broke: {error}") from error
        pending.waiting -= 1
        failure, status = compiled.failure, "failed"
        if compiled.resources is not None:
            pending.resources[role] = compiled.resources
            if failure is None:
                failure = rejection(compiled.resources, self._gpu)
                status = "rejected"
        if failure is not None:
            del self._pending[id(pending)]
            self._answers.append(
                Measurement(
                    pending.job,
                    "rejected" if status == "rejected" else "failed",
                    resources=dict(pending.resources),
                    failure=failure,
                )
            )
        elif pending.waiting == 0:
            del self._pending[id(pending)]
            self._ready.append(pending)
