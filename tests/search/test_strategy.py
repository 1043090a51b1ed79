"""What every strategy keeps to, whatever it is made of."""

from __future__ import annotations

import warnings
from collections import Counter
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

from moeopt.core.trial import Cell
from moeopt.errors import InvalidInputError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.search.make import make_strategy
from moeopt.search.optuna_strategy import OptunaStrategy, failure_constraint
from moeopt.search.pool_search import PoolSearch
from moeopt.search.sampler import LatticeSampler
from moeopt.search.strategy import SearchProblem
from tests.search.replay import jobs_of, problem_of, run

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

STRATEGIES: dict[str, Callable[[SearchProblem], object]] = {
    "lattice": lambda problem: None,
    "random": lambda problem: RandomSampler(),
    "tpe": lambda problem: TPESampler(multivariate=True),
    "tpe-constrained": lambda problem: TPESampler(constraints_func=failure_constraint),
    "gp": lambda problem: GPSampler(),
    "cma": lambda problem: CmaEsSampler(),
    "qmc": lambda problem: QMCSampler(),
    "brute-force": lambda problem: BruteForceSampler(),
    "nsga": lambda problem: NSGAIISampler(),
}


@pytest.fixture
def recording(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


@pytest.mark.parametrize("name", STRATEGIES)
def test_keeps_the_contract(name: str, recording: Recording) -> None:
    batch_sizes = (16,) if name == "gp" else (1, 16)
    problem = problem_of(recording, batch_sizes=batch_sizes, trials=9)
    runs = []
    for _ in range(2):
        device = RecordedDevice(recording)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy = make_strategy(problem, sampler=STRATEGIES[name](problem))
            runs.append(run(strategy, device))
    jobs = jobs_of(runs[0])
    assert jobs == jobs_of(runs[1]), "same problem and seed, other jobs"
    assert len(set(jobs)) == len(jobs), "a job was asked twice"
    assert {job.config for job in jobs} <= set(problem.candidates), "an illegal config was asked"
    timed = Counter(m.job.cell for generation in runs[0] for m in generation if m.us)
    assert set(timed) == set(problem.cells)
    assert set(timed.values()) == {9}, "the trials are a hard limit, and are used"
    for batch_size, chosen in strategy.choose().items():
        assert set(chosen) == {"up", "down"}
        assert chosen["up"].job.cell == Cell("up", batch_size)
        assert chosen["up"].job.config.block_size_m == chosen["down"].job.config.block_size_m
        assert all(m.status == "ok" for m in chosen.values())


@pytest.mark.parametrize("sampler", [None, RandomSampler(), BruteForceSampler(), TPESampler()])
def test_ends_when_all_configs_have_been_tried(
    sampler: optuna.samplers.BaseSampler | None, recording: Recording
) -> None:
    few = problem_of(recording, batch_sizes=(16,), trials=500)
    few = problem_of(recording, batch_sizes=(16,), trials=500, candidates=few.candidates[::9])
    strategy = make_strategy(few, sampler=sampler)
    jobs = jobs_of(run(strategy, RecordedDevice(recording)))
    assert len(jobs) == 2 * len(few.candidates)
    if sampler is not None:
        assert set(jobs) == {type(jobs[0])(cell, c) for cell in few.cells for c in few.candidates}


@pytest.mark.parametrize("sampler", [None, RandomSampler()])
def test_known_measurements_count_toward_the_trials_and_are_not_asked_again(
    sampler: optuna.samplers.BaseSampler | None, recording: Recording
) -> None:
    device = RecordedDevice(recording)
    first = make_strategy(problem_of(recording, trials=5), sampler=sampler)
    before = [m for generation in run(first, device) for m in generation]
    known = {cell: [m for m in before if m.job.cell == cell] for cell in first.problem.cells}
    second = make_strategy(problem_of(recording, trials=8, known=known, seed=1), sampler=sampler)
    jobs = jobs_of(run(second, device))
    assert not set(jobs) & {m.job for m in before}
    assert {second.left(cell) for cell in first.problem.cells} == {0}
    done = make_strategy(problem_of(recording, trials=5, known=known), sampler=sampler)
    assert done.ask() == []
    assert done.choose() == first.choose()


@pytest.mark.parametrize("sampler", [None, TPESampler()])
def test_joint_mode(sampler: optuna.samplers.BaseSampler | None, recording: Recording) -> None:
    strategy = make_strategy(problem_of(recording, mode="joint", trials=8), sampler=sampler)
    run(strategy, RecordedDevice(recording))
    chosen = strategy.choose()
    assert sorted(chosen) == list(recording.batch_sizes)
    assert all(set(parts) == {"joint"} for parts in chosen.values())


@pytest.mark.parametrize("sampler", [None, TPESampler()])
def test_the_order_of_answers_does_not_matter(
    sampler: optuna.samplers.BaseSampler | None, recording: Recording
) -> None:
    device = RecordedDevice(recording)
    asked = []
    for backwards in (False, True):
        strategy = make_strategy(problem_of(recording, batch_sizes=(16,), trials=8), sampler=sampler)
        sequence = []
        while jobs := strategy.ask():
            sequence.append(sorted(jobs))
            answers = list(device.measure(jobs))
            if backwards:
                for answer in reversed(answers):
                    strategy.tell([answer])
            else:
                strategy.tell(answers)
        asked.append(sequence)
    assert asked[0] == asked[1]


@pytest.mark.parametrize("pruner", [WilcoxonPruner(n_startup_steps=2), MedianPruner(n_startup_trials=2)])
@pytest.mark.parametrize("sampler", [None, RandomSampler(seed=0)])
def test_optunas_pruners_race(
    sampler: optuna.samplers.BaseSampler | None, pruner: optuna.pruners.BasePruner, recording: Recording
) -> None:
    problem = problem_of(recording, batch_sizes=(16,), trials=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = make_strategy(problem, sampler=sampler, pruner=pruner)
        done = [m for generation in run(strategy, RecordedDevice(recording)) for m in generation]
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
