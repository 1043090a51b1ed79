"""The loop that joins space, search, device and study database."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from threadpoolctl import threadpool_limits

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES, Role
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.errors import InvalidInputError, StorageError
from moeopt.measure.base import Device
from moeopt.search.ledger import Ledger
from moeopt.search.make import make_strategy
from moeopt.search.strategy import SearchProblem, Strategy
from moeopt.storage.store import StudyKey, StudyStore, TrialWriter
from moeopt.tuning.assemble import SideTimes, assemble, home
from moeopt.tuning.finalists import find_finalists, time_finalists, to_info, with_finals
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.outcome import Counts, Outcome
from moeopt.tuning.starts import find_landscapes, find_portfolio
from moeopt.tuning.stored import kept_finals

if TYPE_CHECKING:
    from moeopt.tuning.progress import TuneProgress

# A change of the search, its recordings or the cost model's fits that makes old runs not replayable raises this.
SEARCH_VERSION: Final = 7
Share = Callable[[StudyStore, Device, StudyKey, str], AbstractContextManager[Device]]


def alone(store: StudyStore, device: Device, key: StudyKey, run: str) -> AbstractContextManager[Device]:
    """Shares the jobs with nobody: the device itself."""
    return nullcontext(device)


# Configs of the portfolio that are compiled ahead.
PREFETCHED: Final = 12


@dataclass
class _Tally:
    """What happened in this run."""

    compiled: set[tuple[LaunchConfig, Role]] = field(default_factory=set)
    configs: set[LaunchConfig] = field(default_factory=set)
    status: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    resumed: int = 0

    def add(self, measurement: Measurement) -> None:
        self.status[measurement.status] += 1
        for role in measurement.resources:
            self.compiled.add((measurement.job.config, role))
        if measurement.resources:
            self.configs.add(measurement.job.config)
        if measurement.failure is not None and measurement.status == "failed":
            self.reasons[measurement.failure.reason] += 1


class Tuner:
    """One run: asks a strategy for jobs, has a device measure them, and keeps what comes back.

    A run that was cut off is resumed by replay: every stored trial carries the tag of its run, and
    a run with the same tag is answered from the database for as long as it asks for what is there.
    The search being a function of its seed and of what it was told, the end is that of a run that
    was never cut off. Trials of other runs are known from the start and count toward the budget.
    """

    def __init__(
        self,
        device: Device,
        store: StudyStore,
        options: TuneOptions,
        progress: TuneProgress | None = None,
        share: Share = alone,
    ) -> None:
        """
        Args:
            device: What measures.
            store: Where measurements are kept.
            options: What to do.
            progress: Told of every measurement.
            share: Gives the device that the search measures with, such as one whose jobs workers may take.

        Raises:
            InvalidInputError: The device has no such batch size, or no config of the space fits it.
        """
        self.device = device
        self.store = store
        self.options = options
        self.progress = progress
        self._share = share
        self.notes: list[str] = []
        self.interrupted = False
        self.storage_error: StorageError | None = None
        self.key = StudyKey.of(device, options.mode)
        self.cells = options.cells()
        self.timings: defaultdict[str, float] = defaultdict(float)
        self._ledger = Ledger(self.cells)
        self._side_times = SideTimes()
        self._landscapes = find_landscapes(device)
        self._tally = _Tally()
        self._check_batch_sizes()
        self.space = SearchSpace.named(options.space, device.shape, extras=device.space_extras())
        configs = self.space.configs()
        self.candidates = tuple(device.candidates(configs))
        self._infeasible = len(configs) - len(self.candidates)
        if not self.candidates:
            raise InvalidInputError(
                f"none of the {len(configs)} configs of space {self.space.name!r} fits {device.gpu.name}: "
                "give another space or shape"
            )

    def run(self) -> Outcome:
        """Tunes.

        Returns:
            The best of all that is known at the end, also where a timeout or an interrupt cut the run
            off (``interrupted`` is then set, and a note says so).
        """
        # The search's matrices are small: more threads only wait for each other and for the compilers, and
        # another number of threads would give other last digits, so another run.
        with threadpool_limits(limits=1, user_api="blas"):
            return self._run()

    def _run(self) -> Outcome:
        start = time.monotonic()
        deadline = start + self.options.timeout if self.options.timeout is not None else None
        strategy: Strategy | None = None
        writer: TrialWriter | None = None
        try:
            with self._timed("storage"):
                self.store.lock(self.key)
                self.notes.extend(self.store.notices(self.key))
            run = self._open_run()
            if not run.finished:
                # These will be asked for first: they compile while the GPU is still being made ready.
                self.device.prefetch(run.portfolio[:PREFETCHED])
            with self._timed("storage"):
                stored = self.store.load(self.key, self.cells)
                writer = self.store.writer(self.key)
            self._time_defaults()
            memo: dict[Job, Measurement] = {}
            known: dict[Cell, list[Measurement]] = {cell: [] for cell in self.cells}
            for cell, trials in stored.items():
                for trial in trials:
                    measurement = trial.measurement
                    if trial.run == run.tag and not run.finished:
                        memo[measurement.job] = measurement
                    else:
                        known[cell].append(measurement)
                        self._ledger.add([measurement])
            strategy = self._strategy(known, run.portfolio)
            self._tally.resumed = sum(map(len, known.values()))
            done = run.finished or self._search(strategy, memo, writer, run.tag, deadline)
            if not run.finished and not self.device.info.recorded:
                self._time_finalists()
            if done and not run.finished:
                self._close_run(run)
            if self.options.mode == "joint":
                self._time_winners(self._final_ledger().choose(raced_out=True))
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("interrupted: these are the best so far; run the same command to go on")
        except StorageError as error:
            if strategy is None:
                raise
            self.storage_error = error
            self.notes.append(f"{error}; these are the best so far")
        finally:
            if writer is not None:
                with self._timed("storage"):
                    self._close_writer(writer)
        self.notes.extend(self.device.notices())
        ledger = self._final_ledger()
        rows = assemble(self.options.mode, ledger, ledger.choose(raced_out=True), self._side_times)
        return Outcome(
            shape=self.device.shape,
            gpu=self.device.gpu.name,
            info=self.device.info,
            mode=self.options.mode,
            space=self.space.name,
            seed=self.options.seed,
            wall_s=time.monotonic() - start,
            rows=rows,
            counts=self._counts(),
            notes=tuple(self.notes),
            timings=dict(self.timings),
            storage=self.store.url,
            key=self.key,
        )

    def _close_writer(self, writer: TrialWriter) -> None:
        """A database that went away and did not come back costs its copy of the measurements, not the result."""
        try:
            writer.close()
        except StorageError as error:
            self.storage_error = error
            self.notes.append(str(error))

    def _check_batch_sizes(self) -> None:
        there = self.device.batch_sizes
        missing = [m for m in self.options.batch_sizes if there is not None and m not in there]
        if missing:
            raise InvalidInputError(
                f"batch size {missing[0]} is not in the recording: it holds {', '.join(map(str, there or ()))}"
            )

    # -- runs ---------------------------------------------------------------------------------------

    def _open_run(self) -> _Run:
        """This run's tag, and what an earlier run with the same tag left behind."""
        options = self.options
        what = {
            "search": SEARCH_VERSION,
            "cells": [[cell.role, cell.batch_size] for cell in self.cells],
            "space": [self.space.name, {k: list(v) for k, v in self.space.values.items()}],
            "candidates": len(self.candidates),
            "trials": options.trials,
            "seed": options.seed,
            "sampler": _describe(options.sampler),
            "pruner": _describe(options.pruner),
        }
        tag = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
        with self._timed("storage"):
            info = self.store.cell_info(self.key, self.cells[0]).get(f"run:{tag}", {})
        if info:
            kept = tuple(LaunchConfig.from_dict(config) for config in info["portfolio"])
            return _Run(tag, kept, bool(info.get("finished")))
        with self._timed("search"):
            # moeopt's own search learns from the recordings themselves: a list made of them as well counts them twice.
            recorded = () if options.sampler is None else self._landscapes
            portfolio = find_portfolio(self.device, self.cells, self.candidates, recorded, self.store)
        run = _Run(tag, tuple(portfolio), False)
        self._save_run(run)
        return run

    def _close_run(self, run: _Run) -> None:
        self._save_run(_Run(run.tag, run.portfolio, True))

    def _save_run(self, run: _Run) -> None:
        # The portfolio is kept with the run: it grows with the storage, and a replay needs the same.
        info = {
            "portfolio": [config.to_dict() for config in run.portfolio],
            "finished": run.finished,
            "space": self.space.name,
            "params": list(self.space.values),
            "trials": self.options.trials,
            "seed": self.options.seed,
            "batch_sizes": list(self.options.batch_sizes),
        }
        with self._timed("storage"):
            self.store.set_cell_info(self.key, self.cells[0], {f"run:{run.tag}": info})

    def _strategy(self, known: Mapping[Cell, Sequence[Measurement]], portfolio: Sequence[LaunchConfig]) -> Strategy:
        rooflines = {cell: self.device.roofline_us(cell) for cell in self.cells}
        problem = SearchProblem(
            shape=self.device.shape,
            gpu=self.device.gpu,
            space=self.space,
            mode=self.options.mode,
            cells=self.cells,
            candidates=self.candidates,
            trials=self.options.trials,
            seed=self.options.seed,
            known={cell: tuple(measurements) for cell, measurements in known.items()},
            portfolio=tuple(portfolio),
            roofline_us={cell: us for cell, us in rooflines.items() if us is not None},
            landscapes=self._landscapes,
            defaults={
                cell: self.device.default_config(role, cell.batch_size)
                for cell in self.cells
                for role in cell.roles[:1]
            },
        )
        with self._timed("search"):
            return make_strategy(problem, sampler=self.options.sampler, pruner=self.options.pruner)

    # -- measuring ----------------------------------------------------------------------------------

    def _search(
        self,
        strategy: Strategy,
        memo: Mapping[Job, Measurement],
        writer: TrialWriter,
        tag: str,
        deadline: float | None,
    ) -> bool:
        """Asks, measures and tells until the strategy is done (True) or time is over (False)."""
        with self._share(self.store, self.device, self.key, tag) as device:
            return self._search_on(device, strategy, memo, writer, tag, deadline)

    def _search_on(
        self,
        device: Device,
        strategy: Strategy,
        memo: Mapping[Job, Measurement],
        writer: TrialWriter,
        tag: str,
        deadline: float | None,
    ) -> bool:
        sequence = 0
        while True:
            with self._timed("search"):
                jobs = strategy.ask()
            if not jobs:
                return True
            done = [job for job in jobs if job in memo]
            for job in done:
                self._ledger.add([memo[job]])
                strategy.tell([memo[job]])
                self._tally.resumed += 1
            todo = [job for job in jobs if job not in memo]
            sequence += len(done)
            with closing(self._measured(device, todo, strategy.race)) as results:
                for measurement in results:
                    self._tally.add(measurement)
                    self._ledger.add([measurement])
                    writer.put(measurement.job.cell, measurement, tag, sequence)
                    sequence += 1
                    with self._timed("search"):
                        strategy.tell([measurement])
                    if self.progress is not None:
                        self.progress.measured(measurement, self._tally.status)
                    if deadline is not None and time.monotonic() >= deadline:
                        self.notes.append(
                            f"the timeout of {self.options.timeout:g} s was reached: these are the best so far; "
                            "run the same command to go on"
                        )
                        return False

    def _measured(self, device: Device, jobs: Sequence[Job], race: Race) -> Generator[Measurement]:
        """Device.measure, with the time that it takes put down."""
        if not jobs:
            return
        with closing(device.measure(jobs, race)) as results:
            while True:
                with self._timed("measure"):
                    measurement = next(results, None)
                if measurement is None:
                    return
                yield measurement

    def _side(self, what: str, jobs: Mapping[Cell, Job]) -> dict[Cell, float]:
        """Times one config per (role, batch size) that is no trial, such as a default.

        What comes back is kept beside the cell's trials, so that it is timed once.
        """
        found: dict[Cell, float] = {}
        todo: list[Job] = []
        for cell, job in jobs.items():
            kept = self._info(cell).get(f"{what}_{cell.role}")
            if kept is None or kept["config"] != job.config.to_dict():
                todo.append(job)
            elif kept["us"] is not None:
                found[cell] = kept["us"]
        for measurement in self._measured(self.device, todo, never_stop):
            cell = measurement.job.cell
            us = measurement.median_us if measurement.status == "ok" else None
            if us is not None:
                found[cell] = us
            self._keep(cell, {f"{what}_{cell.role}": {"config": measurement.job.config.to_dict(), "us": us}})
        return found

    def _info(self, cell: Cell) -> dict[str, Any]:
        return self.store.cell_info(self.key, home(self.options.mode, cell))

    def _keep(self, cell: Cell, info: Mapping[str, Any]) -> None:
        with self._timed("storage"):
            self.store.set_cell_info(self.key, home(self.options.mode, cell), info)

    def _time_defaults(self) -> None:
        """Times the engine's default config, where the device can run it, and looks up the rooflines."""
        jobs = {}
        for m in self.options.batch_sizes:
            for role in ROLES:
                cell, config = Cell(role, m), self.device.default_config(role, m)
                if self.device.candidates([config]):
                    jobs[cell] = Job(cell, config)
                roofline = self.device.roofline_us(cell)
                if roofline is not None:
                    self._side_times.roofline_us[cell] = roofline
                    self._keep(cell, {f"roofline_{role}": roofline})
                moved = self.device.launch_bytes(cell)
                if moved is not None:
                    self._keep(cell, {f"bytes_{role}": round(moved)})
        self._side_times.default_us = self._side("default", jobs)

    def _time_finalists(self) -> None:
        """Times once more, in turn, what could be the best of its cell."""
        jobs = find_finalists(self._ledger)
        with self._timed("measure"):
            finals = time_finalists(self.device, jobs) if jobs else {}
        for cell in self.cells:
            with self._timed("storage"):
                self.store.set_cell_info(self.key, cell, {"finals": to_info(cell, finals)})

    def _final_ledger(self) -> Ledger:
        return with_finals(self._ledger, kept_finals(self.store, self.key, self.cells))

    def _time_winners(self, chosen: Mapping[int, Mapping[Any, Measurement]]) -> None:
        """In joint mode sums are measured: times the winners once more, each projection alone."""
        configs = {m: parts["joint"].job.config for m, parts in chosen.items() if "joint" in parts}
        jobs = {Cell(role, m): Job(Cell(role, m), config) for m, config in configs.items() for role in ROLES}
        self._side_times.winner_us = self._side("winner", jobs)

    # -- results ------------------------------------------------------------------------------------

    def _counts(self) -> Counts:
        tally = self._tally
        return Counts(
            space=len(self.space),
            infeasible=self._infeasible,
            compiled=len(tally.compiled),
            rejected=tally.status["rejected"],
            measured=tally.status["ok"] + tally.status["raced_out"],
            raced_out=tally.status["raced_out"],
            failed=tally.status["failed"],
            unique_compiled=len(tally.configs),
            resumed=tally.resumed,
            reasons=dict(tally.reasons),
        )

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.timings[what] += time.monotonic() - start


@dataclass(frozen=True)
class _Run:
    """A run as the database knows it."""

    tag: str
    portfolio: tuple[LaunchConfig, ...]
    finished: bool


def _describe(part: object) -> str | None:
    """Names a sampler or pruner by its type: two of one type count as the same."""
    return None if part is None else f"{type(part).__module__}.{type(part).__qualname__}"
