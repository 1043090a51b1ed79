"""Optuna samplers as strategies, over an enumerated set of legal configs."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import optuna
from optuna.trial import TrialState, create_trial

from moeopt.core.config import PARAMETERS, LaunchConfig, check_parameters
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.search.pruner import RacingPruner
from moeopt.search.race import PrunerRace, quiet_study
from moeopt.search.sampler import PoolSampler
from moeopt.search.strategy import SearchProblem, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, Trial

_CONSTRAINTS: Final = "constraints"  # where Optuna keeps a trial's constraint values
_GENERATIONS: Final = 6
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))


def failure_constraint(trial: FrozenTrial) -> tuple[float]:
    """A ``constraints_func`` for Optuna samplers: over 0 for configs that do not compile or run.

    Example:
        >>> from optuna.samplers import TPESampler
        >>> sampler = TPESampler(constraints_func=failure_constraint)
    """
    return (1.0 if "failure" in trial.user_attrs else 0.0,)


class OptunaStrategy(Strategy):
    """Runs one in-memory Optuna study per cell.

    The parameters are those of the study database (:meth:`SearchSpace.distributions`), so that samplers for
    numbers see the order. A suggestion that is illegal or was asked before is moved to the nearest legal config
    not asked yet; Optuna hears only of what was really tried.

    Args:
        problem: What to search.
        sampler: Copied for every cell, and seeded with the problem's seed; ours is also told the cell.
        pruner: Ends the timing of a config.
        batch: Configs per cell and generation; by default a sixth of the trials, since a generation
            costs a wait for the compiler.
    """

    def __init__(
        self, problem: SearchProblem, sampler: BaseSampler, pruner: BasePruner | None = None, batch: int | None = None
    ) -> None:
        super().__init__(problem)
        self._race = PrunerRace(pruner or RacingPruner(), self.ledger)
        self._batch = batch or max(1, round(problem.trials / _GENERATIONS))
        self._legal = _Legal(problem)
        for one in _nested(sampler):
            if isinstance(one, optuna.samplers.PartialFixedSampler):  # which passes over what it does not know
                check_parameters(one._fixed_params, "fixed parameter", known=self._legal.distributions)
        # GPSampler learns from finished trials with a value alone: it would propose a failure for ever.
        self._failures_need_value = any(isinstance(one, optuna.samplers.GPSampler) for one in _nested(sampler))
        self._studies = {cell: self._make_study(sampler, cell) for cell in problem.cells}
        self._running: dict[Job, Trial] = {}
        self._told: set[Job] = set()
        self._begun = False

    def _make_study(self, sampler: BaseSampler, cell: Cell) -> optuna.Study:
        seed = self.problem.seed + 1009 * self.problem.cells.index(cell)
        if isinstance(sampler, PoolSampler):
            return quiet_study(optuna.pruners.NopPruner(), sampler.for_cell(cell, seed))
        own = _copy(sampler)
        _seed(own, seed)
        return quiet_study(optuna.pruners.NopPruner(), own)

    def ask(self) -> list[Job]:
        self._finish_told()
        jobs = [job for cell in self.problem.cells for job in self._ask_cell(cell)]
        self._begun = True
        return jobs

    def _ask_cell(self, cell: Cell) -> list[Job]:
        rows = self.ledger.rows(cell)
        attempts_left = 2 * self.problem.trials - len(rows)  # failures are not timed, but must end too
        count = min(self.left(cell), attempts_left)
        taken = {self._legal.index[c] for c in set(rows) | self.ledger.failed() if c in self._legal.index}
        first = (
            [] if self._begun else self._first(cell, taken)[: min(count, max(self._batch, self.problem.trials // 3))]
        )
        if first:
            return [self._open(cell, index, self._suggest(cell, index)) for index in first]
        jobs: list[Job] = []
        for _ in range(min(count, self._batch, len(self.problem.candidates) - len(taken))):
            trial = self._suggest(cell)
            index = self._legal.nearest(trial.params, taken)
            taken.add(index)
            jobs.append(self._open(cell, index, trial))
        return jobs

    def _first(self, cell: Cell, taken: set[int]) -> list[int]:
        """The default and the portfolio, as far as they are candidates and new."""
        wanted = [*([self.problem.defaults[cell]] if cell in self.problem.defaults else []), *self.problem.portfolio]
        indices = [self._legal.index[config] for config in wanted if config in self._legal.index]
        return [index for index in dict.fromkeys(indices) if index not in taken]

    def _suggest(self, cell: Cell, index: int | None = None) -> Trial:
        """A running trial with the sampler's suggestion, or with the config of this index."""
        study = self._studies[cell]
        if index is not None:
            study.enqueue_trial(self._legal.params(index))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental samplers, sampling that falls back to independent
            return study.ask(self._legal.distributions)

    def _open(self, cell: Cell, index: int, trial: Trial) -> Job:
        job = Job(cell, self.problem.candidates[index])
        self._running[job] = trial
        return job

    def _finish_told(self) -> None:
        """Adds what is known now to the studies, in the order of the jobs."""
        for cell in self.problem.cells:
            rows = self.ledger.rows(cell)
            # A failure that is told as the worst time so far comes after the times.
            order = sorted(rows, key=lambda config: (self._failures_need_value and not rows[config].us, config))
            for config in order:
                job = Job(cell, config)
                if job in self._told or config not in self._legal.index:
                    continue
                if self._finish(rows[config], self._running.pop(job, None)):
                    self._told.add(job)

    def _finish(self, m: Measurement, trial: Trial | None) -> bool:
        """Tells a study of one; False where that has to wait until something was timed."""
        study = self._studies[m.job.cell]
        attrs: dict[str, Any] = {}
        if trial is not None:
            # The sampler's own notes (a generation's number) go on with what was really tried.
            attrs = dict(study.get_trials(deepcopy=False)[trial.number].system_attrs)
            attrs.pop("fixed_params", None)
            # BruteForceSampler stops a study that it has walked through; ask() sees that itself.
            with contextlib.suppress(RuntimeError):
                study.tell(trial, state=TrialState.FAIL)
        index = self._legal.index[m.job.config]
        failed = not m.us
        state, value = (TrialState.PRUNED, None) if failed else (TrialState.COMPLETE, math.log(m.median_us))
        if failed and self._failures_need_value:
            done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            if not done:
                return False
            state, value = TrialState.COMPLETE, max(t.value for t in done if t.value is not None)
        study.add_trial(
            create_trial(
                state=state,
                value=value,
                params=self._legal.params(index),
                distributions=self._legal.distributions,
                user_attrs={"failure": m.failure.reason if m.failure else "runtime"} if failed else {},
                system_attrs={**attrs, _CONSTRAINTS: (1.0 if failed else 0.0,)},
                intermediate_values=dict(enumerate(m.us)),
            )
        )
        return True

    def tell(self, measurements: Sequence[Measurement]) -> None:
        super().tell(measurements)
        self._race.tell(measurements)

    def race(self, job: Job, rounds: Sequence[float]) -> bool:
        return self._race.lost(job, rounds)


class _Legal:
    """The legal configs, as points that a suggestion can be near to.

    A coordinate is a parameter on its scale in Optuna, over what the space spans of it: 0 to 1.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self._space = problem.space
        self.distributions = problem.space.distributions()
        self._rows = [PARAMETERS[key] for key in self.distributions]
        self._configs = problem.candidates
        points = self._scaled([problem.space.params(config) for config in problem.candidates])
        self._low = points.min(axis=0)
        self._span = np.maximum(points.max(axis=0) - self._low, 1e-9)
        self._points = (points - self._low) / self._span
        self.index: dict[LaunchConfig, int] = {c: i for i, c in enumerate(problem.candidates)}

    def params(self, index: int) -> dict[str, Any]:
        return self._space.params(self._configs[index])

    def nearest(self, params: Mapping[str, Any], taken: set[int]) -> int:
        """The nearest config not taken; the first of the list where several are as near."""
        point = np.clip((self._scaled([params])[0] - self._low) / self._span, 0.0, 1.0)
        distance = np.abs(self._points - point).sum(axis=1)
        if taken:
            distance[np.fromiter(sorted(taken), dtype=np.int64)] = np.inf
        return int(np.argmin(distance))

    def _scaled(self, params: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        numbers = [[float(one[row.key]) for row in self._rows] for one in params]
        logs = np.array([row.log for row in self._rows])
        values = np.array(numbers, dtype=np.float64).reshape(len(params), len(self._rows))
        return np.where(logs, np.log2(np.maximum(values, 1.0)), values)


def _seed(sampler: BaseSampler, seed: int) -> None:
    """Seeds every random state of a sampler and of the samplers inside it.

    Optuna's ``reseed_rng`` draws a seed from the operating system, which would make a resumed run
    differ; its samplers keep their states in attributes that have an ``rng``.
    """
    for one in _nested(sampler):
        for value in vars(one).values():
            if isinstance(getattr(value, "rng", None), np.random.RandomState):
                value.rng.seed(seed % 2**32)
        if isinstance(one, optuna.samplers.QMCSampler):
            one._seed = seed % 2**32  # of the scrambling


def _nested(sampler: BaseSampler) -> Iterator[BaseSampler]:
    """A sampler and all samplers inside it."""
    yield sampler
    for value in vars(sampler).values():
        if isinstance(value, optuna.samplers.BaseSampler):
            yield from _nested(value)


def _copy(sampler: BaseSampler) -> BaseSampler:
    """A sampler of the same state. Its locks, which NSGA-II has since Optuna 5.1 and nothing can copy, are new."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    parts: list[object] = [sampler]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, _LOCKS):
            memo[id(part)] = threading.RLock()
        parts += getattr(part, "__dict__", {}).values()
    return copy.deepcopy(sampler, memo)
