"""Device that compiles in many processes and times in one: what a GPU is to the tuning loop."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeVar

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES, Role
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.errors import DeviceError
from moeopt.kernels.base import MoEKernel
from moeopt.measure.base import Device, DeviceSpec
from moeopt.measure.bench import BenchFacts
from moeopt.measure.compile_queue import BatchPlan, Compiler, ReadyJob
from moeopt.measure.monitor import GpuMonitor, GpuState
from moeopt.measure.supervisor import Supervisor

T = TypeVar("T")
log = logging.getLogger(__name__)

# Results are held back until the control config, timed again, agrees with its time before them.
CHUNK_S: Final = 1.0
DRIFT_LIMIT: Final = 0.02
_CONTROL_BATCH_SIZE: Final = 256
_PREFETCH_PRIORITY: Final = 10
_CONTROL_PRIORITY: Final = -1
_POLL_S: Final = 0.5


@dataclass(frozen=True)
class DeviceStatistics:
    """What a device has done so far.

    Attributes:
        worker_starts: GPU worker processes started.
        restarts: Why the later ones were needed.
        compiled_in_worker: Kernels that the GPU process had to compile: 0 if the compile pool did it all.
        loaded_in_worker: Kernels that it took from Triton's cache.
        gpu_s: Seconds in which the GPU ran kernels that were checked or timed.
        timing_s: Seconds spent on checks and timings, the control config's included.
        control_s: Of these, seconds for the control config.
        wait_s: Seconds in which nothing was ready to be timed.
        start_s: Seconds waited for the worker to come up.
        timed: Jobs timed.
        timed_again: Jobs timed a second time because the control config drifted.
        drifts: The drifts over the limit, as shares.
        disturbed: Jobs timed while another process used the GPU.
        others: Other processes that were on the GPU when it was taken, in words.
        state_start: Clock, temperature and power when the GPU was taken; empty where the driver does not say.
        state_end: The same at the last timing.
    """

    worker_starts: int
    restarts: dict[str, int]
    compiled_in_worker: int
    loaded_in_worker: int
    gpu_s: float
    timing_s: float
    control_s: float
    wait_s: float
    start_s: float
    timed: int
    timed_again: int
    drifts: tuple[float, ...]
    disturbed: int
    others: tuple[str, ...] = ()
    state_start: dict[str, float] = field(default_factory=dict)
    state_end: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class WorkerDevice(Device):
    """Times configs in a supervised worker process, fed by a compiler.

    Args:
        spec: What it is.
        kernel: Decides what is legal.
        supervisor: Owns the worker; started here if it is not yet.
        compiler: Gives the binaries; closed with the device.
        batch_sizes: What will probably be timed: prepared ahead while nothing else is to do.
        monitor: The GPU's driver, or None.
        wait_idle: Seconds to wait for other processes on the GPU before each batch.
    """

    def __init__(
        self,
        *,
        spec: DeviceSpec,
        kernel: MoEKernel,
        supervisor: Supervisor,
        compiler: Compiler,
        batch_sizes: Sequence[int] = (),
        monitor: GpuMonitor | None = None,
        wait_idle: float = 0.0,
    ) -> None:
        super().__init__(spec)
        self.kernel = kernel
        self._supervisor = supervisor
        self._compiler = compiler
        self._monitor = monitor
        self._wait_idle = wait_idle
        self._planned = tuple(batch_sizes)
        self._known_pid: int | None = None
        self._control: Job | None = None
        self._control_settled = False
        self._before: float | None = None
        self._state = GpuState()
        self._first_state: GpuState | None = None
        self._others: tuple[str, ...] = ()
        self._launched = ""
        self._busy: str | None = None
        self._polled = 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._counted: Counter[str] = Counter()
        self._drifts: list[float] = []
        self._measuring = False
        cells = [Cell(role, m) for m in self._planned for role in ROLES]
        self._supervisor.prepare(cells)
        self._supervisor.start()

    def statistics(self) -> DeviceStatistics:
        """What it has done so far."""
        counts, totals = self._supervisor.counts, self._supervisor.totals()
        return DeviceStatistics(
            worker_starts=counts.starts,
            restarts=dict(counts.restarts),
            compiled_in_worker=totals.compiled,
            loaded_in_worker=totals.loaded,
            gpu_s=round(totals.gpu_s, 6),
            timing_s=round(self._spent["timing"], 4),
            control_s=round(self._spent["control"], 4),
            wait_s=round(self._spent["wait"], 4),
            start_s=round(self._spent["start"], 4),
            timed=self._counted["timed"],
            timed_again=self._counted["again"],
            drifts=tuple(self._drifts),
            disturbed=self._counted["disturbed"],
            others=self._others,
            state_start=(self._first_state or GpuState()).to_dict(),
            state_end=self._state.to_dict(),
        )

    def prefetch(self, configs: Iterable[LaunchConfig]) -> None:
        """Has them compiled once nothing more urgent is to compile."""
        for rank, config in enumerate(configs):
            for role in ROLES:
                if self._illegal_reason(config, role) is None:
                    self._compiler.submit(config, role, self._usual(role), priority=_PREFETCH_PRIORITY + rank)

    def close(self) -> None:
        self._supervisor.close()
        self._compiler.close()

    def _usual(self, role: Role) -> int:
        """A batch size whose binary most of the planned ones share."""
        if not self._planned:
            return _CONTROL_BATCH_SIZE
        names = {m: self.kernel.specialisation(self.spec.shape, role, m) for m in self._planned}
        common = Counter(names.values()).most_common(1)[0][0]
        return next(m for m, name in names.items() if name == common)

    def _illegal_reason(self, config: LaunchConfig, role: Role) -> str | None:
        return self.kernel.illegal_reason(config, self.spec.shape, role, self.spec.gpu)

    def _illegal(self, job: Job) -> str | None:
        for role in job.cell.roles:
            reason = self._illegal_reason(job.config, role)
            if reason is not None:
                return reason
        return None

    # -- measuring ------------------------------------------------------------------------------

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement, None, None]:
        """Times the jobs.

        Results come in bursts of about :data:`CHUNK_S`: a burst is given out once the control config,
        timed before and after it, agrees within :data:`DRIFT_LIMIT`. If it does not, the burst is
        timed once more; if it still does not, its measurements carry ``disturbed``.

        Raises:
            DeviceError: The worker refuses the GPU (memory, driver) or cannot be kept alive.
        """
        if not jobs:
            return
        control = self._submit_control(jobs)
        plan = BatchPlan(jobs, self._compiler, self.spec.gpu, self._illegal)
        self._measuring = True
        try:
            self._ensure_worker()
            control()
            still_busy = self._quiet()
            yield from self._work_off(plan, race, still_busy)
        finally:
            self._measuring = False
            plan.cancel()

    def _work_off(self, plan: BatchPlan, race: Race, still_busy: str | None) -> Iterator[Measurement]:
        held: list[Measurement] = []
        self._before = None
        since = 0.0
        while not plan.finished or held:
            yield from plan.answers()
            if not held:
                since = time.monotonic()
            end = since + CHUNK_S
            if time.monotonic() < end and plan.ready:
                if self._before is None:
                    self._before = self._time_control()
                held += self._timed(functools.partial(plan.take, end), race, still_busy)
            elif held and (plan.finished or time.monotonic() >= end or not plan.compiling):
                yield from self._settle(held, race, still_busy)
                held = []
            else:
                start = time.monotonic()
                plan.wait(min(0.25, max(0.001, end - start)) if held else 0.25)
                self._spent["wait"] += time.monotonic() - start

    def _timed(self, take: Callable[[], ReadyJob | None], race: Race, still_busy: str | None) -> list[Measurement]:
        """Works off what ``take`` gives."""
        found = []
        start = time.monotonic()
        for measurement in self._supervisor.run(take, race):
            self._poll()
            if measurement.failure is None:
                self._describe(measurement, still_busy or self._busy)
            found.append(measurement)
        self._spent["timing"] += time.monotonic() - start
        self._counted["timed"] += len(found)
        return found

    def _describe(self, measurement: Measurement, disturbed: str | None) -> None:
        """Notes the GPU's state with a measurement."""
        measurement.extra.update(self._state.to_dict())
        if disturbed is not None:
            measurement.extra["disturbed"] = disturbed
            self._counted["disturbed"] += 1

    def _settle(self, held: list[Measurement], race: Race, still_busy: str | None) -> Iterator[Measurement]:
        drift = self._drift()
        if drift is None or not any(m.us for m in held):
            yield from held
            return
        log.warning("the control config drifted by %.1f %%: %d timings are repeated", 100 * drift, len(held))
        yield from (m for m in held if not m.us)
        again = [ReadyJob(m.job, m.resources) for m in reversed(held) if m.us]
        self._counted["again"] += len(again)
        repeated = self._timed(lambda: again.pop() if again else None, race, still_busy)
        second = self._drift()
        for measurement in repeated:
            measurement.extra["timed_again"] = f"the control config had drifted by {100 * drift:.1f} %"
            if second is not None:
                measurement.extra.setdefault("disturbed", f"the control config drifted by {100 * second:.1f} %")
            yield measurement

    # -- the control config ---------------------------------------------------------------------

    def _submit_control(self, jobs: Sequence[Job]) -> Callable[[], None]:
        """Asks for the control config's binary; the function that is returned waits for it."""
        if self._control_settled:
            return lambda: None
        sizes = self._planned or sorted({job.cell.batch_size for job in jobs})
        batch_size = min(sizes, key=lambda m: (abs(m.bit_length() - _CONTROL_BATCH_SIZE.bit_length()), m))
        job = Job(Cell("up", batch_size), self.spec.default_config("up", batch_size))
        if self._illegal(job) is not None:
            log.warning("the default config does not fit %s: timings go without a control config", self.spec.gpu.name)
            self._control_settled = True
            return lambda: None
        future = self._compiler.submit(job.config, "up", batch_size, priority=_CONTROL_PRIORITY)

        def wait() -> None:
            start = time.monotonic()
            compiled = future.result()
            self._spent["wait"] += time.monotonic() - start
            self._control_settled = True
            if compiled.failure is None:
                self._control = job
            else:
                log.warning("the default config does not compile: timings go without a control config")

        return wait

    def control_us(self) -> float | None:
        """Times the control config: microseconds, or None where it cannot run here.

        The config is the engine's default for the planned batch size nearest to 256, role ``up``.
        """
        control = self._submit_control([])
        self._ensure_worker()
        control()
        return self._time_control()

    def _time_control(self) -> float | None:
        if self._control is None:
            return None
        start = time.monotonic()
        jobs = [ReadyJob(self._control)]
        found = None
        for measurement in self._supervisor.run(lambda: jobs.pop() if jobs else None, None):
            if measurement.failure is None:
                found = measurement.median_us
            else:
                log.warning("timings go on without a control config: %s", measurement.failure.message)
                self._control = None
        spent = time.monotonic() - start
        self._spent["timing"] += spent
        self._spent["control"] += spent
        return found

    def _drift(self) -> float | None:
        """How far the control config moved since it was last timed, if over the limit."""
        before, self._before = self._before, self._time_control()
        if before is None or self._before is None:
            return None
        drift = abs(self._before / before - 1.0)
        if drift <= DRIFT_LIMIT:
            return None
        self._drifts.append(round(drift, 4))
        return drift

    # -- the worker and the GPU's state ---------------------------------------------------------

    def _ensure_worker(self) -> BenchFacts:
        start = time.monotonic()
        facts = self._supervisor.facts()
        self._spent["start"] += time.monotonic() - start
        if facts.kernel != self._launched:
            self._launched = facts.kernel
            log.info("launched on %s: %s", self.spec.gpu.name, self._launched)
        self._poll(force=True)
        return facts

    def _meet_others(self) -> None:
        """Names, once, who else has the GPU."""
        if self._monitor is None or self._first_state is not None:
            return
        self._first_state = self._state
        self._others = tuple(str(process) for process in self._monitor.others())
        if self._others:
            log.warning(
                "not alone on %s: %s; what is timed while another process is busy is marked as disturbed "
                "(--wait-idle waits for quiet moments)",
                self.spec.gpu.name, ", ".join(self._others),
            )  # fmt: skip

    def _ask(self, question: Callable[[Any], T]) -> T:
        if self._measuring:
            raise DeviceError(f"the GPU worker is timing and cannot be asked for {question.__name__!r} now")
        self._ensure_worker()
        return self._supervisor.ask(question)

    def _quiet(self) -> str | None:
        if self._monitor is None or self._wait_idle <= 0:
            return None
        return self._monitor.wait_idle(self._wait_idle)

    def _poll(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self._monitor is None or (now - self._polled < _POLL_S and not force):
            return
        self._polled = now
        pid = self._supervisor.pid
        self._state = self._monitor.state()
        if pid is not None and pid != self._known_pid:
            self._monitor.learn_own(pid)
            self._known_pid = pid
            self._meet_others()
        self._busy = self._monitor.busy()
