"""Compiling on a Ray cluster: each binary once, as a CPU task, its files brought to the GPUs that ask.

GPUs ask the one :class:`CompileBroker`; it has :func:`compile_here` run wherever a core is free. What
comes back is put into the asking machine's Triton cache, where the GPU's worker process finds it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import socket
import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from moeopt.compile import Compiled, CompilePool, triton_cache_dir
from moeopt.core.config import LaunchConfig
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Failure
from moeopt.errors import DeviceError
from moeopt.kernels.base import MoEKernel

log = logging.getLogger(__name__)

_INSTALLERS: Final = 2
_GROUP: Final = "__grp__"  # begins the name of the file in which Triton lists those of one binary
# Files of one binary: compressed content by (directory in Triton's cache, name).
Parcel = dict[tuple[str, str], bytes]


@dataclass(frozen=True)
class CompileSetup:
    """What all compiles of a device have in common.

    Attributes:
        kernel: What to compile.
        shape: The layer.
        capability: Compute capability to compile for.
        cache_dir: Triton's cache on every machine; None for the one that Triton uses by itself there.
    """

    kernel: MoEKernel
    shape: MoEShape
    capability: tuple[int, int]
    cache_dir: Path | None = None

    @property
    def identity(self) -> tuple[KernelKey, MoEShape, tuple[int, int], Path | None]:
        """Equal where one pool serves both."""
        return self.kernel.key, self.shape, self.capability, self.cache_dir


_pools: dict[Any, CompilePool] = {}


def compile_here(
    setup: CompileSetup, config: LaunchConfig, role: Role, batch_size: int
) -> tuple[tuple[Compiled, str], Parcel]:
    """The task: compiles one config in a process of its own, under the pool's deadline.

    Returns:
        What a pool answers and the machine that compiled, and the binary's files.
    """
    pool = _pools.get(setup.identity)
    if pool is None:
        for other in _pools.values():
            other.close()
        _pools.clear()
        pool = _pools[setup.identity] = CompilePool(
            setup.kernel, setup.shape, setup.capability, workers=1, cache_dir=setup.cache_dir
        )
    compiled = pool.submit(config, role, batch_size).result()
    paths = [Path(path) for path in compiled.files.values()]
    parcel = {(path.parent.name, path.name): zlib.compress(path.read_bytes(), 1) for path in paths}
    return (compiled, socket.gethostname()), parcel


def install(parcel: Mapping[tuple[str, str], bytes], cache_dir: Path) -> None:
    """Puts a binary's files into a Triton cache, as if it had been compiled with it."""
    import triton
    from triton.runtime.cache import FileCacheManager

    for directory in {directory for directory, _ in parcel}:
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(cache_dir)
            manager = FileCacheManager(directory)
        group = {
            name: manager.put(zlib.decompress(data), name)
            for (where, name), data in parcel.items()
            if where == directory
        }
        # Last, as it is what Triton looks for.
        manager.put_group(next(name for name in group if name.endswith(".json")), group)


def _is_there(files: Mapping[str, str], cache_dir: Path) -> bool:
    groups = [Path(path) for name, path in files.items() if name.endswith(".json")]
    return all((cache_dir / path.parent.name / f"{_GROUP}{path.name}").exists() for path in groups)


@dataclass
class _Entry:
    setup: CompileSetup
    config: LaunchConfig
    role: Role
    batch_size: int
    done: asyncio.Future[Any]
    begun: bool = False
    waiting: int = 0
    keep: set[Any] = field(default_factory=set)


class CompileBroker:
    """An actor beside the tuning process: has each binary compiled once, the most urgent first.

    Args:
        reserved: Cores that are left to the GPUs' processes.
        workers: Most compiles at a time, or None for all cores of the cluster but those reserved.
    """

    def __init__(self, reserved: int, workers: int | None) -> None:
        import ray

        self._ray: Any = ray
        self._reserved = reserved
        self._workers = workers
        # A task whose machine dies is started again elsewhere.
        self._task: Any = ray.remote(compile_here).options(
            num_cpus=1, num_returns=2, scheduling_strategy="SPREAD", max_retries=3
        )
        self._entries: dict[Any, _Entry] = {}
        self._queue: list[tuple[int, int, _Entry]] = []
        self._order = itertools.count()
        self._running = 0
        self.tasks = 0

    async def compile(
        self, setup: CompileSetup, config: LaunchConfig, role: Role, batch_size: int, priority: int
    ) -> tuple[tuple[Compiled, str], list[Any]]:
        """One binary: what :func:`compile_here` says of it, and a reference to its files."""
        key = (setup.identity, config, role, setup.kernel.specialisation(setup.shape, role, batch_size))
        entry = self._entries.get(key)
        if entry is None:
            done = asyncio.get_running_loop().create_future()
            entry = self._entries[key] = _Entry(setup, config, role, batch_size, done)
        if not entry.begun:
            heapq.heappush(self._queue, (priority, next(self._order), entry))
        entry.waiting += 1
        self._pump()
        try:
            answer: tuple[tuple[Compiled, str], list[Any]] = await asyncio.shield(entry.done)
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.begun:  # nobody wants it any more
                self._entries.pop(key, None)
        return answer

    async def started(self) -> int:
        """How many compiles were begun."""
        return self.tasks

    def _pump(self) -> None:
        while self._queue and self._running < self._limit():
            _, _, entry = heapq.heappop(self._queue)
            if entry.begun or not entry.waiting:
                continue
            entry.begun = True
            self._running += 1
            self.tasks += 1
            running = asyncio.ensure_future(self._run(entry))
            entry.keep.add(running)

    async def _run(self, entry: _Entry) -> None:
        try:
            answer, parcel = self._task.remote(entry.setup, entry.config, entry.role, entry.batch_size)
            try:
                entry.done.set_result((await answer, [parcel]))
            except (self._ray.exceptions.RaySystemError, self._ray.exceptions.WorkerCrashedError) as error:
                kernel, shape = entry.setup.kernel, entry.setup.shape
                failed = Compiled(
                    entry.config,
                    entry.role,
                    kernel.specialisation(shape, entry.role, entry.batch_size),
                    failure=Failure("compile", f"the Ray task died, again and again: {str(error).splitlines()[0]}"),
                )
                entry.done.set_result(((failed, ""), []))
        except Exception as error:  # noqa: BLE001  (the border of a process: raised where it was asked for)
            entry.done.set_exception(error)
        finally:
            self._running -= 1
            self._pump()

    def _limit(self) -> int:
        cores = int(self._ray.cluster_resources().get("CPU", 1)) - self._reserved
        return max(1, cores if self._workers is None else min(cores, self._workers))


class RayCompiler:
    """The compiler of one GPU's device, on whatever machine that is.

    Args:
        broker: Handle of the cluster's :class:`CompileBroker`.
        setup: What to compile.
    """

    def __init__(self, broker: Any, setup: CompileSetup) -> None:
        self._broker = broker
        self._setup = setup
        self._cache_dir = setup.cache_dir or triton_cache_dir()
        self._known: dict[tuple[LaunchConfig, Role, str], tuple[Future[Compiled], int]] = {}
        self._lock = threading.Lock()
        self._installers = ThreadPoolExecutor(_INSTALLERS, thread_name_prefix="moeopt-install")
        self._closed = False

    def submit(self, config: LaunchConfig, role: Role, batch_size: int, *, priority: int = 0) -> Future[Compiled]:
        """Asks for one binary, which is in this machine's cache once the future is done.

        Each distinct (config, role, specialisation) is asked for once, and again where more urgent.

        Raises:
            DeviceError: It is closed.
        """
        if self._closed:
            raise DeviceError("the compiler is closed: open the device again")
        key = (config, role, self._setup.kernel.specialisation(self._setup.shape, role, batch_size))
        with self._lock:
            future, known = self._known.get(key, (None, priority))
            if future is not None and (future.done() or known <= priority) and not future.cancelled():
                return future
            if future is None or future.cancelled():
                future = Future()
            self._known[key] = future, priority
        self._ask(future, config, role, batch_size, priority)
        return future

    def _ask(self, future: Future[Compiled], config: LaunchConfig, role: Role, batch_size: int, priority: int) -> None:
        import ray

        answer = self._broker.compile.remote(self._setup, config, role, batch_size, priority)

        def ended(done: Future[Compiled]) -> None:
            if done.cancelled():
                ray.cancel(answer)

        future.add_done_callback(ended)
        answer.future().add_done_callback(lambda done: self._arrived(done, future))

    def _arrived(self, answer: Future[Any], future: Future[Compiled]) -> None:
        if not self._closed and not future.done():
            self._installers.submit(self._install, answer, future)

    def _install(self, answer: Future[Any], future: Future[Compiled]) -> None:
        import ray

        try:
            (compiled, host), parcels = answer.result()
            if compiled.failure is not None and compiled.failure.log and host != socket.gethostname():
                compiled = replace(compiled, failure=replace(compiled.failure, log=f"{host}:{compiled.failure.log}"))
            elif not _is_there(compiled.files, self._cache_dir):
                install(ray.get(parcels[0]), self._cache_dir)
        except Exception as error:  # noqa: BLE001  (the border of a thread: raised where it was asked for)
            broken = DeviceError(f"compiling on the Ray cluster failed: {str(error).splitlines()[-1]}")
            with self._lock:
                if not future.done() and future.set_running_or_notify_cancel():
                    future.set_exception(broken)
            return
        with self._lock:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_result(compiled)

    def close(self) -> None:
        """Drops what is not compiled. May be called more than once."""
        self._closed = True
        with self._lock:
            futures = [future for future, _ in self._known.values()]
        for future in futures:
            future.cancel()
        self._installers.shutdown(wait=False, cancel_futures=True)
