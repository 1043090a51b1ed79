"""The loop that joins space, search, device and study database."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Final

import msgspec
from threadpoolctl import threadpool_limits

from moeopt.core.config import LaunchConfig
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import InvalidInputError, StorageError
from moeopt.measure.base import Device
from moeopt.search.ledger import Ledger
from moeopt.search.make import make_strategy
from moeopt.search.strategy import SearchProblem, Strategy
from moeopt.storage.facts import CellFacts, Run
from moeopt.storage.store import StudyKey, StudyStore, TrialWriter
from moeopt.tuning.assemble import assemble
from moeopt.tuning.baselines import BaselineTimer
from moeopt.tuning.finalists import find_finalists, time_finalists, with_finals
from moeopt.tuning.load import kept_finals
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.outcome import Outcome
from moeopt.tuning.resume import Replay, keep_run, kept_run, new_run
from moeopt.tuning.starts import find_landscapes, find_portfolio
from moeopt.tuning.tally import Stopwatch, Tally

if TYPE_CHECKING:
    from moeopt.tuning.progress import TuneProgress

Share = Callable[[StudyStore, Device, StudyKey, str], AbstractContextManager[Device]]
# Configs of the portfolio that are compiled ahead.
PREFETCHED: Final = 12


def alone(store: StudyStore, device: Device, key: StudyKey, run: str) -> AbstractContextManager[Device]:
    """Shares the jobs with nobody: the device itself."""
    return nullcontext(device)


class Tuner:
    """One run: asks a strategy for jobs, has a device measure them, and keeps what comes back.

    What happens to a run that was cut off: see :mod:`moeopt.tuning.resume`.
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
        self.spec = device.spec
        self.store = store
        self.options = options
        self.progress = progress
        self._share = share
        self.notes: list[str] = []
        self.interrupted = False
        self.storage_error: StorageError | None = None
        self.key = StudyKey.of(device, options.mode)
        self.cells = options.cells()
        self._check_batch_sizes()
        self.space = SearchSpace.named(options.space, self.spec.shape, extras=self.spec.space_extras)
        configs = self.space.configs()
        self.candidates = tuple(self.spec.candidates(configs))
        if not self.candidates:
            raise InvalidInputError(
                f"none of the {len(configs)} configs of space {self.space.name!r} fits {self.spec.gpu.name}: "
                "give another space or shape"
            )
        self._ledger = Ledger(self.cells)
        self._landscapes = find_landscapes(device)
        self._tally = Tally()
        self._watch = Stopwatch()
        self._baselines = BaselineTimer(device, store, self.key, self._watch)
        self._writer: TrialWriter | None = None

    def run(self) -> Outcome:
        """Tunes.

        Returns:
            The best of all that is known at the end, also where a timeout or an interrupt cut the run
            off (``interrupted`` is then set, and a note says so).
        """
        start = time.monotonic()
        deadline = start + self.options.timeout if self.options.timeout is not None else None
        # The search's matrices are small: more threads only wait for each other and for the compilers, and
        # another number of threads would give other last digits, so another run.
        with threadpool_limits(limits=1, user_api="blas"):
            self._run_until(deadline)
            self.notes.extend(self.device.notices())
            return self._outcome(time.monotonic() - start)

    def _run_until(self, deadline: float | None) -> None:
        """Tunes to the end, the deadline, an interrupt or the loss of the database."""
        try:
            with self._watch.time("storage"):
                self.store.lock(self.key)
                self.notes.extend(self.store.notices(self.key))
            run = self._open_run()
            if not run.finished:
                # These will be asked for first: they compile while the GPU is still being made ready.
                self.device.prefetch(run.portfolio[:PREFETCHED])
            with self._watch.time("storage"):
                replay = Replay.of(self.store.load(self.key, self.cells), run)
                self._writer = self.store.writer(self.key)
            self._tune(run, replay, self._writer, deadline)
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("interrupted: these are the best so far; run the same command to go on")
        except StorageError as error:
            if self._writer is None:
                raise
            self.storage_error = error
            self.notes.append(f"{error}; these are the best so far")
        finally:
            self._close_writer()

    def _tune(self, run: Run, replay: Replay, writer: TrialWriter, deadline: float | None) -> None:
        for measurements in replay.known.values():
            self._ledger.add(measurements)
            self._tally.resume(measurements)
        self._baselines.time_defaults(self.options.batch_sizes)
        if not run.finished:
            strategy = self._strategy(replay.known, run.portfolio)
            with self._share(self.store, self.device, self.key, run.tag) as device:
                done = self._search(device, strategy, replay.memo, writer, run.tag, deadline)
            if not self.spec.provenance.recorded:
                self._time_finalists()
            if done:
                self._keep_run(msgspec.structs.replace(run, finished=True))
        if self.options.mode == "joint":
            chosen = self._final_ledger().choose(raced_out=True)
            self._baselines.time_winners({m: best["joint"].job.config for m, best in chosen.items() if "joint" in best})

    def _close_writer(self) -> None:
        """A database that went away and did not come back costs its copy of the measurements, not the result."""
        if self._writer is not None:
            try:
                with self._watch.time("storage"):
                    self._writer.close()
            except StorageError as error:
                self.storage_error = error
                self.notes.append(str(error))

    def _check_batch_sizes(self) -> None:
        there = self.spec.batch_sizes
        missing = [m for m in self.options.batch_sizes if there is not None and m not in there]
        if missing:
            raise InvalidInputError(
                f"batch size {missing[0]} is not in the recording: it holds {', '.join(map(str, there or ()))}"
            )

    def _open_run(self) -> Run:
        """This run, with what an earlier one with the same tag left behind."""
        run = new_run(self.options, self.space, len(self.candidates))
        with self._watch.time("storage"):
            kept = kept_run(self.store, self.key, self.options, run.tag)
        if kept is not None:
            return kept
        with self._watch.time("search"):
            # moeopt's own search learns from the recordings themselves: a list made of them as well counts them twice.
            recorded = () if self.options.sampler is None else self._landscapes
            portfolio = find_portfolio(self.device, self.cells, self.candidates, recorded, self.store)
        run = msgspec.structs.replace(run, portfolio=portfolio)
        self._keep_run(run)
        return run

    def _keep_run(self, run: Run) -> None:
        with self._watch.time("storage"):
            keep_run(self.store, self.key, self.options, run)

    def _strategy(self, known: Mapping[Cell, Sequence[Measurement]], portfolio: Sequence[LaunchConfig]) -> Strategy:
        problem = SearchProblem(
            shape=self.spec.shape,
            gpu=self.spec.gpu,
            space=self.space,
            mode=self.options.mode,
            cells=self.cells,
            candidates=self.candidates,
            trials=self.options.trials,
            seed=self.options.seed,
            known={cell: tuple(measurements) for cell, measurements in known.items()},
            portfolio=tuple(portfolio),
            landscapes=self._landscapes,
            defaults={
                cell: self.spec.default_config(role, cell.batch_size) for cell in self.cells for role in cell.roles[:1]
            },
        )
        with self._watch.time("search"):
            return make_strategy(problem, sampler=self.options.sampler, pruner=self.options.pruner)

    def _search(
        self,
        device: Device,
        strategy: Strategy,
        memo: Mapping[Job, Measurement],
        writer: TrialWriter,
        tag: str,
        deadline: float | None,
    ) -> bool:
        """Asks, measures and tells until the strategy is done (True) or time is over (False)."""
        sequence = 0
        while True:
            with self._watch.time("search"):
                jobs = strategy.ask()
            if not jobs:
                return True
            replayed = [memo[job] for job in jobs if job in memo]
            self._ledger.add(replayed)
            strategy.tell(replayed)
            self._tally.resume(replayed)
            sequence += len(replayed)
            with closing(self._watch.measure(device, [j for j in jobs if j not in memo], strategy.race)) as results:
                for measurement in results:
                    self._tally.add(measurement, elsewhere=measurement.job in self.store.timed_elsewhere)
                    self._ledger.add([measurement])
                    writer.put(measurement.job.cell, measurement, tag, sequence)
                    sequence += 1
                    with self._watch.time("search"):
                        strategy.tell([measurement])
                    if self.progress is not None:
                        self.progress.measured(measurement, self._tally.status)
                    if deadline is not None and time.monotonic() >= deadline:
                        self.notes.append(
                            f"the timeout of {self.options.timeout:g} s was reached: these are the best so far; "
                            "run the same command to go on"
                        )
                        return False

    def _time_finalists(self) -> None:
        """Times once more, in turn, what could be the best of its cell."""
        jobs = find_finalists(self._ledger)
        with self._watch.time("measure"):
            finals = time_finalists(self.device, jobs) if jobs else {}
        facts = {
            cell: CellFacts(finals={job.config: us for job, us in finals.items() if job.cell == cell})
            for cell in self.cells
        }
        with self._watch.time("storage"):
            self.store.add_facts(self.key, facts)

    def _final_ledger(self) -> Ledger:
        return with_finals(self._ledger, kept_finals(self.store, self.key, self.cells))

    def _outcome(self, wall_s: float) -> Outcome:
        ledger, space = self._final_ledger(), len(self.space)
        mode, chosen = self.options.mode, ledger.choose(raced_out=True)
        return Outcome(
            shape=self.spec.shape,
            gpu=self.spec.gpu.name,
            info=self.spec.provenance,
            mode=mode,
            space=self.space.name,
            seed=self.options.seed,
            wall_s=wall_s,
            rows=assemble(mode, ledger, chosen, self._baselines.found),
            counts=self._tally.counts(space, space - len(self.candidates)),
            notes=tuple(self.notes),
            timings=dict(self._watch.seconds),
            storage=self.store.url,
            key=self.key,
        )
