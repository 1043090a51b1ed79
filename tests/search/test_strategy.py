"""What every strategy keeps to, whatever it is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.pruners import MedianPruner, WilcoxonPruner
from optuna.samplers import (
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)

from moeopt.errors import InvalidInputError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.search.make import make_strategy
from moeopt.search.optuna_strategy import OptunaStrategy, failure_constraint
from moeopt.search.pool_search import PoolSearch
from moeopt.search.sampler import LatticeSampler
from moeopt.search.strategy import SearchProblem, Strategy
from moeopt.testing.suites import StrategyTestCase
from moeopt.testing.suites.strategy import play
from tests.search.replay import problem_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

STRATEGIES: dict[str, Callable[[SearchProblem], object]] = {
    "lattice": lambda problem: None,
    "random": lambda problem: RandomSampler(),
    "tpe": lambda problem: TPESampler(multivariate=True),
    "tpe-constrained": lambda problem: TPESampler(constraints_func=failure_constraint),
    "cma": lambda problem: CmaEsSampler(),
    "qmc": lambda problem: QMCSampler(),
    "brute-force": lambda problem: BruteForceSampler(),
    "nsga": lambda problem: NSGAIISampler(),
}


@pytest.fixture
def recording(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


@pytest.mark.filterwarnings("ignore")
class TestStrategies(StrategyTestCase):
    @pytest.fixture(params=STRATEGIES)
    def make_strategy(self, request: pytest.FixtureRequest) -> Callable[[SearchProblem], Strategy]:
        sampler = STRATEGIES[request.param]
        return lambda problem: make_strategy(problem, sampler=sampler(problem))

    @pytest.fixture
    def recording(self, tiny_recording: Callable[..., Path]) -> Recording:
        return Recording.load(tiny_recording())


@pytest.mark.filterwarnings("ignore")
def test_gpsampler_keeps_to_it(recording: Recording) -> None:
    """A part of the suite: a suggestion of Optuna's takes long."""

    def make(problem: SearchProblem) -> Strategy:
        return make_strategy(problem, sampler=GPSampler(n_startup_trials=3))

    case, device = StrategyTestCase(), RecordedDevice(recording)
    problem = problem_of(recording, batch_sizes=(16,), trials=4)
    case.test_the_budget_is_used_and_nothing_is_asked_twice(make, problem, device)
    case.test_the_same_problem_gives_the_same_jobs(make, problem, device)


@pytest.mark.parametrize("pruner", [WilcoxonPruner(n_startup_steps=2), MedianPruner(n_startup_trials=2)])
@pytest.mark.parametrize("sampler", [None, RandomSampler(seed=0)])
def test_optunas_pruners_race(
    sampler: optuna.samplers.BaseSampler | None, pruner: optuna.pruners.BasePruner, recording: Recording
) -> None:
    problem = problem_of(recording, batch_sizes=(16,), trials=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = make_strategy(problem, sampler=sampler, pruner=pruner)
        done = [m for generation in play(strategy, RecordedDevice(recording)) for m in generation]
    raced = [m for m in done if m.status == "raced_out"]
    assert raced, "no config was stopped early"
    best = {cell: strategy.ledger.incumbent(cell).median_us for cell in problem.cells}
    assert all(m.median_us > best[m.job.cell] for m in raced)


def test_another_seed_asks_otherwise(recording: Recording) -> None:
    jobs = []
    for seed in (0, 1):
        strategy = make_strategy(problem_of(recording, seed=seed), sampler=RandomSampler())
        jobs.append(strategy.ask())
    assert jobs[0] != jobs[1]


def test_make_strategy_takes_any_sampler(recording: Recording) -> None:
    problem = problem_of(recording)
    assert isinstance(make_strategy(problem), PoolSearch)
    assert isinstance(make_strategy(problem, sampler=RandomSampler()), OptunaStrategy)
    ours = LatticeSampler(problem.space, problem.candidates)
    assert isinstance(make_strategy(problem, sampler=ours), OptunaStrategy)


@pytest.mark.parametrize("changes", [{"trials": 0}, {"cells": ()}, {"candidates": ()}])
def test_a_problem_without_anything_to_do_is_refused(changes: dict[str, object], recording: Recording) -> None:
    with pytest.raises(InvalidInputError, match="at least"):
        problem_of(recording, **changes)
