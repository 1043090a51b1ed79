"""The loop that joins space, search, device and study database."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from moeopt.errors import InvalidInputError
from moeopt.measure.base import Cell, Device, Failure, Job, Measurement, Race, never_stop
from moeopt.result import BatchResult, Counts, RoleResult, TuneResult
from moeopt.search.strategy import SearchProblem, Strategy, make_strategy
from moeopt.search.ledger import Ledger
from moeopt.search.portfolio import build_portfolio
from moeopt.shape import ROLES, Role, check_batch_sizes
from moeopt.space import LaunchConfig, SearchSpace
from moeopt.study import StudyKey, StudyStore, TrialWriter

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

    from moeopt.progress import TuneProgress

Mode = Literal["split", "joint"]
MODES: Final = ("split", "joint")

# A change of the search that makes old runs not replayable raises this.
SEARCH_VERSION: Final = 1


@dataclass(frozen=True)
class TuneOptions:
    """What a tune is to do, apart from where.

    Attributes:
        batch_sizes: M, ascending.
        mode: ``split``: a config per projection; ``joint``: one for both.
        space: ``grid`` or ``wide``.
        trials: Most launch configs that may be timed per (batch size, role).
        timeout: Seconds after which the run ends with the best so far, or None.
        seed: Of the search.
        sampler: Any Optuna sampler, or None for moeopt's own search.
        pruner: Any Optuna pruner, or None for moeopt's racing.
    """

    batch_sizes: tuple[int, ...]
    mode: Mode = "split"
    space: str = "grid"
    trials: int = 24
    timeout: float | None = None
    seed: int = 0
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_sizes", check_batch_sizes(self.batch_sizes))
        if self.mode not in MODES:
            raise InvalidInputError(f"mode {self.mode!r} is unknown: give 'split' or 'joint'")
        if isinstance(self.trials, bool) or not isinstance(self.trials, int) or self.trials <= 0:
            raise InvalidInputError(f"trials is {self.trials!r}: give a whole number of at least 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise InvalidInputError(f"seed is {self.seed!r}: give a whole number from 0 to 4294967295")

    def cells(self) -> tuple[Cell, ...]:
        """Every (role, batch size) that gets a config."""
        roles: Sequence[Role | Literal["joint"]] = ROLES if self.mode == "split" else ("joint",)
        return tuple(Cell(role, m) for m in self.batch_sizes for role in roles)


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
        self, device: Device, store: StudyStore, options: TuneOptions, progress: TuneProgress | None = None
    ) -> None:
        self.device = device
        self.store = store
        self.options = options
        self.progress = progress
        self.notes: list[str] = []
        self.interrupted = False
        self.key = StudyKey.of(device, options.mode)
        self.cells = options.cells()
        self.timings: Counter[str] = Counter()
        self._ledger = Ledger(self.cells)
        self._defaults: dict[Cell, float] = {}
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

    def run(self) -> TuneResult:
        """Tunes.

        Returns:
            The best of all that is known at the end, also where a timeout or an interrupt cut the run
            off (``interrupted`` is then set, and a note says so).
        """
        start = time.monotonic()
        deadline = start + self.options.timeout if self.options.timeout is not None else None
        strategy: Strategy | None = None
        writer: TrialWriter | None = None
        try:
            run = self._open_run()
            with self._timed("storage"):
                stored = self.store.load(self.key, self.cells)
                writer = self.store.writer(self.key)
            self._measure_defaults()
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
            if not run.finished and self._search(strategy, memo, writer, run.tag, deadline):
                self._close_run(run)
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("interrupted: these are the best so far; run the same command to go on")
        finally:
            if writer is not None:
                with self._timed("storage"):
                    writer.close()
        rows = self._rows(strategy) if strategy is not None else {}
        return TuneResult(
            shape=self.device.shape,
            gpu=self.device.gpu,
            info=self.device.info,
            mode=self.options.mode,
            space=self.space.name,
            seed=self.options.seed,
            wall_s=time.monotonic() - start,
            rows=rows,
            counts=self._counts(),
            notes=tuple(self.notes),
            timings=dict(self.timings),
            store=self.store,
            key=self.key,
        )

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
            portfolio = [LaunchConfig.from_dict(config) for config in info["portfolio"]]
            return _Run(tag, tuple(portfolio), bool(info.get("finished")))
        with self._timed("search"):
            neighbours = self.store.neighbours(self.key)
            portfolio = build_portfolio(self.device, self.candidates, neighbours)
        run = _Run(tag, tuple(portfolio), False)
        self._save_run(run)
        return run

    def _close_run(self, run: _Run) -> None:
        self._save_run(_Run(run.tag, run.portfolio, True))

    def _save_run(self, run: _Run) -> None:
        # The portfolio is kept with the run: it grows with the storage, and a replay needs the same.
        info = {"portfolio": [config.to_dict() for config in run.portfolio], "finished": run.finished}
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
            with closing(self._measured(todo, strategy.race)) as results:
                for measurement in results:
                    self._tally.add(measurement)
                    self._ledger.add([measurement])
                    writer.put(measurement, tag, sequence)
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

    def _measured(self, jobs: Sequence[Job], race: Race) -> Iterator[Measurement]:
        """Device.measure, with the time that it takes put down."""
        results = self.device.measure(jobs, race) if jobs else iter(())
        with closing(results) if hasattr(results, "close") else nullcontext():
            while True:
                with self._timed("measure"):
                    measurement = next(results, None)
                if measurement is None:
                    return
                yield measurement

    def _side(self, what: str, jobs: Mapping[Cell, Job]) -> dict[Cell, Measurement]:
        """Times one config per cell that is no trial (a default), and keeps it beside the cell's trials."""
        found: dict[Cell, Measurement] = {}
        todo: list[Job] = []
        infos = {cell: self.store.cell_info(self.key, cell) for cell in jobs}
        for cell, job in jobs.items():
            kept = infos[cell].get(what)
            if kept is not None and kept["config"] == job.config.to_dict():
                found[cell] = Measurement(job, "ok", us=tuple(kept["us"])) if kept["us"] else _untimed(job)
            else:
                todo.append(job)
        for measurement in self._measured(todo, never_stop):
            found[measurement.job.cell] = measurement
            us = list(measurement.us) if measurement.status == "ok" else []
            self.store.set_cell_info(
                self.key, measurement.job.cell, {what: {"config": measurement.job.config.to_dict(), "us": us}}
            )
        return found

    def _measure_defaults(self) -> None:
        """Times the engine's default config, where the device can run it."""
        jobs = {}
        for m in self.options.batch_sizes:
            for role in ROLES:
                config = self.device.default_config(role, m)
                if self.device.candidates([config]):
                    jobs[Cell(role, m)] = Job(Cell(role, m), config)
        self._defaults = {cell: m.median_us for cell, m in self._side("default", jobs).items() if m.us}

    # -- results ------------------------------------------------------------------------------------

    def _rows(self, strategy: Strategy) -> dict[int, BatchResult]:
        chosen = strategy.choose()
        if self.options.mode == "joint":
            return self._joint_rows(chosen)
        rows = {}
        for m, parts in chosen.items():
            if not ({"up", "down"} <= set(parts)):
                continue
            joint = best_joint(self._ledger, m)
            rows[m] = BatchResult(
                batch_size=m,
                up=self._role("up", m, parts["up"]),
                down=self._role("down", m, parts["down"]),
                joint_config=joint[1] if joint else None,
                joint_us=joint[0] if joint else None,
            )
        return rows

    def _joint_rows(self, chosen: Mapping[int, Mapping[Any, Measurement]]) -> dict[int, BatchResult]:
        """Splits the sums that were measured into up and down, by timing the winners once more, each alone."""
        configs = {m: parts["joint"].job.config for m, parts in chosen.items() if "joint" in parts}
        jobs = {Cell(role, m): Job(Cell(role, m), config) for m, config in configs.items() for role in ROLES}
        alone = self._side("joint_winner", jobs) if not self.interrupted else {}
        rows = {}
        for m, config in configs.items():
            total = chosen[m]["joint"].median_us
            up, down = alone.get(Cell("up", m)), alone.get(Cell("down", m))
            share = up.median_us / (up.median_us + down.median_us) if up and down and up.us and down.us else 0.5
            joint = Cell("joint", m)
            rows[m] = BatchResult(
                batch_size=m,
                up=self._result("up", m, config, total * share, joint),
                down=self._result("down", m, config, total * (1 - share), joint),
                joint_config=config,
                joint_us=total,
            )
        return rows

    def _role(self, role: Role, m: int, measurement: Measurement) -> RoleResult:
        return self._result(role, m, measurement.job.config, measurement.median_us, Cell(role, m))

    def _result(self, role: Role, m: int, config: LaunchConfig, us: float, counted: Cell) -> RoleResult:
        return RoleResult(
            config=config,
            us=us,
            measured=len(self._ledger.timed(counted)),
            default_us=self._defaults.get(Cell(role, m)),
            roofline_us=self.device.roofline_us(Cell(role, m)),
        )

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


def best_joint(ledger: Ledger, m: int) -> tuple[float, LaunchConfig] | None:
    """The best config among those timed in full for both projections, as (µs of both, config)."""
    up, down = ledger.full(Cell("up", m)), ledger.full(Cell("down", m))
    return min(((up[c].median_us + down[c].median_us, c) for c in up if c in down), default=None)


def _untimed(job: Job) -> Measurement:
    return Measurement(job, "failed", failure=Failure("runtime", "the default config could not be timed"))


def _describe(part: object) -> str | None:
    """Names a sampler or pruner by its type: two of one type count as the same."""
    return None if part is None else f"{type(part).__module__}.{type(part).__qualname__}"


def parse_timeout(text: str | float | None) -> float | None:
    """``90``, ``90s``, ``5m`` or ``1h`` as seconds.

    Raises:
        InvalidInputError: It is something else or not positive.
    """
    if text is None:
        return None
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|)\s*", str(text))
        if not match:
            raise InvalidInputError(f"timeout is {text!r}: give seconds, or 90s, 5m, 1h")
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if not seconds > 0:
        raise InvalidInputError(f"timeout is {text!r}: give more than 0 seconds")
    return seconds
