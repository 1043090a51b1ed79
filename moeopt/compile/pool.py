"""A pool of compile processes that nothing a compiler does can stop.

Every slot of the pool is a loky executor with one process, so that a process that hangs, aborts or
is killed takes only its own task along, and which task that was is never in doubt.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import queue
import re
import signal
import statistics
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from moeopt.compile import worker
from moeopt.compile.binary import TensorCore
from moeopt.compile.failure_memo import FailureMemo, triton_cache_dir
from moeopt.compile.logs import keep_log, remove_stale_logs, running_log
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Failure, Resources
from moeopt.errors import DeviceError, InvalidInputError
from moeopt.kernels.base import MoEKernel

log = logging.getLogger(__name__)

DEADLINE_FLOOR_S: Final = 5.0
DEADLINE_FACTOR: Final = 8.0
# Until so many compiles are done there is no median to speak of.
_SAMPLES_WANTED: Final = 5
_FIRST_DEADLINE_S: Final = 60.0
_START_DEADLINE_S: Final = 300.0
_MOST_START_FAILURES: Final = 3
_TICK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Compiled:
    """One binary, or why there is none.

    Attributes:
        config: What was asked for.
        role: Which projection.
        specialisation: The kernel's name for the binary that the batch size runs.
        resources: What the compiler said, or None if it failed.
        failure: Why it failed, or None.
        remembered: Whether the failure is of an earlier run and cost nothing now.
        tensor_core: The tensor-core instruction, where the pool looks for it.
        files: Where Triton keeps the binary: path by name.
    """

    config: LaunchConfig
    role: Role
    specialisation: str
    resources: Resources | None = None
    failure: Failure | None = None
    remembered: bool = False
    tensor_core: TensorCore | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Task:
    config: LaunchConfig
    role: Role
    batch_size: int
    specialisation: str
    future: Future[Compiled]
    priority: int
    log_path: Path
    begun: bool = False
    killed: bool = False

    @property
    def key(self) -> tuple[LaunchConfig, Role, str]:
        return self.config, self.role, self.specialisation


@dataclass
class _Slot:
    executor: Any = None
    ready: bool = False
    task: _Task | None = None
    since: float = 0.0
    overdue: str | None = None
    failed_starts: int = 0
    retired: bool = False
    generation: int = 0


@dataclass
class PoolCounts:
    """What a pool has done so far."""

    asked: int = 0
    compiled: int = 0
    failed: int = 0
    remembered: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=200))


class CompilePool:
    """Cross-compiles launch configs in many processes, without a GPU, filling Triton's cache.

    Args:
        kernel: What to compile.
        shape: The layer.
        capability: Compute capability to compile for, such as ``(12, 0)``.
        workers: Number of processes; None for one less than the cores this process may use.
        cache_dir: Triton's cache; None for the one Triton uses by itself. A process that launches
            the kernels finds the binaries there if its TRITON_CACHE_DIR is the same.
        inspect: Whether to look for the tensor-core instruction of each binary, too.
        log_dir: Where the output of failed compiles is kept; None for ``moeopt/logs`` in the cache.

    Raises:
        InvalidInputError: ``workers`` is not at least 1.
    """

    def __init__(
        self,
        kernel: MoEKernel,
        shape: MoEShape,
        capability: tuple[int, int],
        workers: int | None = None,
        cache_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        *,
        inspect: bool = False,
    ) -> None:
        if workers is not None and workers < 1:
            raise InvalidInputError(f"workers is {workers}: give at least 1 compile process")
        if workers is None:
            import joblib

            workers = max(1, joblib.cpu_count() - 1)
        self.kernel = kernel
        self.shape = shape
        self.capability = capability
        self.workers = workers
        self.cache_dir = Path(cache_dir) if cache_dir is not None else triton_cache_dir()
        self.log_dir = Path(log_dir) if log_dir is not None else self.cache_dir / "moeopt" / "logs"
        self.counts = PoolCounts()
        self._memo = FailureMemo.open(self.cache_dir, kernel.key, capability)
        self._known: dict[tuple[LaunchConfig, Role, str], _Task] = {}
        self._queue: list[tuple[int, int, _Task]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._slots = [_Slot() for _ in range(workers)]
        self._setup = worker.Setup(kernel, shape, capability, os.getpid(), inspect)
        self._broken: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- the caller's side ---------------------------------------------------------------------

    def submit(self, config: LaunchConfig, role: Role, batch_size: int, *, priority: int = 0) -> Future[Compiled]:
        """Asks for one binary. The future's result is a :class:`Compiled`, whatever the compiler does.

        Each distinct (config, role, specialisation) is compiled once: asking again returns the same
        future, moved forward if the priority is more urgent now.

        Args:
            config: What to compile.
            role: Which projection.
            batch_size: Tokens; only what it means for the binary counts.
            priority: The lowest number is compiled first; equal ones in the order they came.

        Raises:
            DeviceError: The pool is closed, its cache cannot be written, or no compile process can be started.
        """
        specialisation = self.kernel.specialisation(self.shape, role, batch_size)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._closed:
                raise DeviceError("the compile pool is closed: make a new one")
            task = self._known.get((config, role, specialisation))
            if task is not None and not task.future.cancelled():
                if priority < task.priority and not task.begun and not task.future.done():
                    task.priority = priority
                    heapq.heappush(self._queue, (priority, next(self._order), task))
                return task.future
            self.counts.asked += 1
            number = next(self._order)
            log_path = running_log(self.log_dir, f"{id(self) & 0xFFFFFF:x}-{number}")
            task = _Task(config, role, batch_size, specialisation, Future(), priority, log_path)
            self._known[task.key] = task
            failure = self._memo.get(self._memo_key(task))
            if failure is not None:
                self.counts.remembered += 1
                task.future.set_result(Compiled(*task.key, failure=failure, remembered=True))
                return task.future
            heapq.heappush(self._queue, (priority, number, task))
            self._start_thread()
        self._events.put(None)
        return task.future

    def start(self) -> None:
        """Starts all processes now, so that they are ready when the first config is asked for."""
        with self._lock:
            self._start_thread()
        self._events.put("start")

    def close(self) -> None:
        """Ends all processes; what was not finished is cancelled. May be called more than once."""
        with self._lock:
            self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._events.put("close")
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def deadline_s(self) -> float:
        """Seconds that one compile may take at this moment, counted from when it begins."""
        seconds = self.counts.seconds
        if len(seconds) < _SAMPLES_WANTED:
            return _FIRST_DEADLINE_S
        return max(DEADLINE_FLOOR_S, DEADLINE_FACTOR * statistics.median(seconds))

    # -- the dispatching thread ----------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
                remove_stale_logs(self.log_dir)
            except OSError as error:
                raise DeviceError(
                    f"compiled kernels cannot be kept in {self.cache_dir} ({error.strerror}: {error.filename}): set "
                    "TRITON_CACHE_DIR to a folder that can be written"
                ) from None
            self._thread = threading.Thread(target=self._run, name="moeopt-compile", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=_TICK_S)
                    if event == "close":
                        return
                    if event == "start":
                        for slot in self._slots:
                            if slot.executor is None:
                                self._start_slot(slot)
                    elif event is not None:
                        self._finished(*event)
                self._enforce_deadlines()
                self._dispatch()
        finally:
            self._stop()

    def _dispatch(self) -> None:
        for slot in self._slots:
            if self._broken is not None:
                return
            if slot.retired:
                continue
            if slot.executor is None:
                starting = sum(s.executor is not None and not s.ready for s in self._slots)
                if starting < len(self._queue):
                    self._start_slot(slot)
            elif slot.ready and slot.task is None:
                task = self._next()
                if task is None:
                    return
                slot.task = task
                self._send(slot, worker.compile_one, task.role, task.batch_size, task.config, str(task.log_path))

    def _next(self) -> _Task | None:
        with self._lock:
            while self._queue:
                _, _, task = heapq.heappop(self._queue)
                if task.begun:  # it was moved forward, and lay in the queue twice
                    continue
                if task.future.running() or task.future.set_running_or_notify_cancel():
                    task.begun = True
                    return task
        return None

    def _start_slot(self, slot: _Slot) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        env = {
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_CACHE_DIR": str(self.cache_dir),
            # Nothing that is part of Triton's cache key (MLIR_DISABLE_MULTITHREADING is): the process that
            # launches has to find these binaries.
            "OMP_NUM_THREADS": "1",
        }
        # A process whose compiler has leaked 300 MB is replaced by loky, which says so each time.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor", UserWarning)
        slot.generation += 1
        slot.executor = ProcessPoolExecutor(max_workers=1, env=env)
        slot.ready = False
        slot.overdue = None
        self._send(slot, worker.start)

    def _send(self, slot: _Slot, function: Callable[..., Any], *args: Any) -> None:
        generation = slot.generation
        slot.since = time.monotonic()
        try:
            future = slot.executor.submit(function, self._setup, *args)
        except RuntimeError as error:  # the process died while idle
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._events.put((slot, generation, done)))

    def _finished(self, slot: _Slot, generation: int, done: Future[Any]) -> None:
        if generation != slot.generation:
            return
        error = done.exception()
        task, slot.task = slot.task, None
        if task is None:
            if error is None:
                slot.ready, slot.failed_starts = True, 0
            else:
                self._start_failed(slot, error)
            return
        elapsed = time.monotonic() - slot.since
        overdue = slot.overdue
        if error is None:
            result = done.result()
            self._deliver(task, result, remember=isinstance(result, worker.Binary) or result.reason == "compile")
        elif overdue is not None:
            self.counts.seconds.append(elapsed)
            self._deliver(task, Failure("timeout", overdue))
        else:
            self._died(task, error)
        if error is not None or overdue is not None:
            self._end_slot(slot)

    def _died(self, task: _Task, error: BaseException) -> None:
        sign = _signal_of(error)
        if sign == "SIGKILL" and not task.killed:
            # Nobody here sent it: the kernel ran out of memory and picked this process, which may not be at fault.
            log.warning("a compile process was killed, probably for lack of memory: %s is tried once more", task.config)
            task.killed, task.begun = True, False
            with self._lock:
                heapq.heappush(self._queue, (task.priority, next(self._order), task))
            return
        if sign == "SIGKILL":
            message = "the compiler was killed twice (SIGKILL), most likely for lack of memory"
        else:
            message = worker.one_line(f"the compiler died ({sign or type(error).__name__})", task.log_path)
        self._deliver(task, Failure("compile", message), remember=sign not in (None, "SIGKILL"))

    def _deliver(self, task: _Task, result: worker.Binary | Failure, *, remember: bool = True) -> None:
        if isinstance(result, Failure):
            result = replace(result, log=keep_log(task.log_path))
            self.counts.failed += 1
            if remember:
                self._memo.add(self._memo_key(task), result)
            compiled = Compiled(*task.key, failure=result)
        else:
            self.counts.compiled += 1
            resources = result.resources
            if resources.compile_s > 0:
                self.counts.seconds.append(resources.compile_s)
            compiled = Compiled(*task.key, resources, tensor_core=result.tensor_core, files=result.files)
        if not task.future.done():  # or the pool broke meanwhile
            task.future.set_result(compiled)

    def _start_failed(self, slot: _Slot, error: BaseException) -> None:
        slot.failed_starts += 1
        sign = f"no answer in {_START_DEADLINE_S:.0f} s" if slot.overdue is not None else _signal_of(error)
        self._end_slot(slot)
        if sign is not None and slot.failed_starts < _MOST_START_FAILURES:
            return
        slot.retired = True
        if sign is not None and not all(s.retired for s in self._slots):
            # There may be memory for fewer processes than were asked for.
            log.warning("a compile process cannot be started (%s): the others go on without it", sign)
        else:
            text = worker.one_line(f"{type(error).__name__}: {error}") if sign is None else f"it dies ({sign})"
            self._broken = DeviceError(f"no compile process can be started: {text}")
            self._cancel_all(self._broken)

    def _enforce_deadlines(self) -> None:
        deadline = self.deadline_s
        for slot in self._slots:
            if slot.executor is None or slot.overdue is not None or (slot.ready and slot.task is None):
                continue
            limit = deadline if slot.ready else _START_DEADLINE_S
            if time.monotonic() - slot.since > limit:
                median = statistics.median(self.counts.seconds) if self.counts.seconds else 0.0
                slot.overdue = f"compiling took over {limit:.0f} s (the median is {median:.1f} s)"
                self._kill(slot)

    def _kill(self, slot: _Slot) -> None:
        """Ends the slot's process and its children at once; loky then fails its future."""
        pid = worker.pid_of(slot.task.log_path) if slot.task is not None else None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        slot.executor.shutdown(wait=False, kill_workers=True)

    def _end_slot(self, slot: _Slot) -> None:
        slot.executor.shutdown(wait=False, kill_workers=True)
        slot.executor, slot.ready, slot.overdue = None, False, None

    def _stop(self) -> None:
        slots = [slot for slot in self._slots if slot.executor is not None]
        for slot in slots:
            self._kill(slot)
        self._cancel_all(CancelledError())
        for slot in slots:
            slot.generation += 1
            slot.executor.shutdown(wait=True, kill_workers=True)
            slot.executor = None
            if slot.task is not None:
                slot.task.log_path.unlink(missing_ok=True)

    def _cancel_all(self, error: BaseException) -> None:
        with self._lock:
            self._queue.clear()
            tasks = list(self._known.values())
        for task in tasks:
            if not task.future.done() and not (isinstance(error, CancelledError) and task.future.cancel()):
                task.future.set_exception(error)

    def _memo_key(self, task: _Task) -> str:
        return f"{self.shape.slug()} {task.role} {task.specialisation} {task.config}"


def _signal_of(error: BaseException) -> str | None:
    """The signal in loky's words for a dead process, such as ``{SIGSEGV(-11)}``."""
    match = re.search(r"\{(SIG\w+)\(-?\d+\)|\{(EXIT\(\d+\))", str(error))
    return (match[1] or match[2]) if match else None
