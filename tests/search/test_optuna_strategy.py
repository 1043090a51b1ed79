"""Optuna's samplers where some configs fail, which shows only when they are tried."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
import torch
from optuna.pruners import MedianPruner, WilcoxonPruner
from optuna.samplers import (
    BaseSampler,
    BruteForceSampler,
    CmaEsSampler,
    GPSampler,
    PartialFixedSampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import TrialState

from moeopt.core.trial import Cell, Measurement
from moeopt.errors import InvalidInputError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.search.optuna_strategy import OptunaStrategy
from moeopt.testing.faults import FaultyDevice, choose_faults
from moeopt.testing.suites.strategy import play
from tests.search.replay import jobs_of, problem_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
TRIALS = 12
CELL = Cell("up", 16)
SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "tpe": TPESampler,
    "gp": lambda: GPSampler(n_startup_trials=5),
    "cma": CmaEsSampler,
    "random": RandomSampler,
    "qmc": lambda: QMCSampler(scramble=True),
    "brute-force": BruteForceSampler,
}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # experimental
    PRUNERS: dict[str, optuna.pruners.BasePruner | None] = {
        "racing": None,
        "wilcoxon": WilcoxonPruner(),
        "median": MedianPruner(n_startup_trials=3),
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """GPSampler's matrices are small: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recording(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


def _faulty(recording: Recording, seed: int = 1) -> FaultyDevice:
    """A quarter of the configs fail: some do not compile, some give wrong numbers, some end the worker."""
    configs = RecordedDevice(recording).spec.candidates(sorted(recording.rows))
    faults = choose_faults(configs, share=0.08, kinds=("compile", "wrong_result", "crash"), seed=seed)
    return FaultyDevice(RecordedDevice(recording), faults)


def _run(
    recording: Recording, sampler: BaseSampler, pruner: optuna.pruners.BasePruner | None = None, trials: int = TRIALS
) -> tuple[OptunaStrategy, list[list[Measurement]]]:
    problem = problem_of(recording, cells=(CELL,), trials=trials, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = OptunaStrategy(problem, sampler, pruner)
        done = play(strategy, _faulty(recording))  # type: ignore[arg-type]
        strategy._finish_told()
    return strategy, done


@pytest.mark.parametrize(
    ("name", "pruner"),
    [
        *(pytest.param(name, PRUNERS["racing"], id=f"{name}-racing") for name in SAMPLERS),
        *(pytest.param("tpe", PRUNERS[pruner], id=f"tpe-{pruner}") for pruner in ("wilcoxon", "median")),
    ],
)
def test_failures_are_told_right_cost_no_budget_and_are_not_tried_again(
    name: str, pruner: optuna.pruners.BasePruner | None, recording: Recording
) -> None:
    trials = 7 if name == "gp" else TRIALS  # it is slow
    strategy, done = _run(recording, SAMPLERS[name](), pruner, trials)
    jobs = jobs_of(done)
    assert len(set(jobs)) == len(jobs), "nothing is asked twice, so nothing timed twice"
    measured = {m.job.config: m for generation in done for m in generation}
    failed = {config for config, m in measured.items() if not m.us}
    assert failed, "some configs were to fail"
    assert len(measured) - len(failed) == trials or len(measured) == 2 * trials, "failures do not count as timed"
    assert len(measured) - len(failed) <= trials, "the budget is kept"

    study = strategy._studies[CELL]
    told = [t for t in study.trials if t.state != TrialState.FAIL]
    by_config = {strategy.problem.candidates[_index(strategy, t)]: t for t in told}
    assert len(by_config) == len(told), "a study hears of each config once"
    worst = float("-inf")
    for trial in told:
        config = strategy.problem.candidates[_index(strategy, trial)]
        bad = config in failed
        assert trial.system_attrs["constraints"] == (1.0 if bad else 0.0,)
        assert ("failure" in trial.user_attrs) == bad
        if not bad:
            assert trial.state == TrialState.COMPLETE
            worst = max(worst, trial.value)
        elif name == "gp":
            assert (trial.state, trial.value) == (TrialState.COMPLETE, worst), "the worst value so far"
        else:
            assert (trial.state, trial.value) == (TrialState.PRUNED, None)
    assert set(by_config) == set(measured), "and of each that was tried"


def _index(strategy: OptunaStrategy, trial: optuna.trial.FrozenTrial) -> int:
    return next(i for i in range(len(strategy.problem.candidates)) if strategy._legal.params(i) == trial.params)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "gp"])  # see test_strategy.py
def test_the_same_seed_asks_the_same(name: str, recording: Recording) -> None:
    runs = [jobs_of(_run(recording, SAMPLERS[name]())[1]) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "make",
    [lambda: GPSampler(n_startup_trials=5), lambda: PartialFixedSampler({}, GPSampler(n_startup_trials=5))],
    ids=["alone", "in another sampler"],
)
def test_gpsampler_leaves_what_failed(make: Callable[[], BaseSampler], recording: Recording) -> None:
    """Told of failures as others are, it proposes the same point again and again."""
    problem = problem_of(recording, cells=(CELL,), trials=8, seed=5)
    strategy = OptunaStrategy(problem, make(), batch=1)
    proposed: list[tuple[int, ...]] = []
    nearest = strategy._legal.nearest

    def listen(params: dict[str, int], taken: set[int]) -> int:
        proposed.append(tuple(params.values()))
        return nearest(params, taken)

    strategy._legal.nearest = listen  # type: ignore[method-assign]
    play(strategy, _faulty(recording, seed=5))  # type: ignore[arg-type]
    assert Counter(proposed).most_common(1)[0][1] <= 3


def test_failures_before_the_first_time_are_no_obstacle(recording: Recording) -> None:
    """There is no worst value yet."""
    strategy = OptunaStrategy(problem_of(recording, cells=(CELL,), trials=6, seed=3), GPSampler(), batch=2)
    device = RecordedDevice(recording)
    for number in range(6):
        jobs = strategy.ask()
        if number < 2:
            every = dict.fromkeys((job.config for job in jobs), "compile")
            strategy.tell(list(FaultyDevice(device, every).measure(jobs)))  # type: ignore[arg-type]
        else:
            strategy.tell(list(device.measure(jobs)))
    assert strategy.ask() == []
    states = Counter(t.state for t in strategy._studies[CELL].trials if t.state != TrialState.FAIL)
    assert states == {TrialState.COMPLETE: 10}, "the early failures are told once there is a time"


def test_times_are_found_among_failures(recording: Recording) -> None:
    """A sampler that learns comes near the best that does not fail."""
    device = _faulty(recording)
    rows = {c: r for c, r in recording.rows.items() if r.status == "ok" and c not in device.faults}
    best = min(statistics.median(row.roles["up"].us[16]) for row in rows.values())
    strategy, _ = _run(recording, TPESampler())
    incumbent = strategy.ledger.incumbent(CELL)
    assert incumbent is not None
    assert incumbent.median_us < 1.1 * best


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("block_size_m", "fixed parameter key 'block_size_m' is unknown: give BLOCK_SIZE_M"),
        ("use_tma", "fixed parameter key 'use_tma' is unknown: the keys are BLOCK_SIZE_M, "),
        ("USE_TMA", "fixed parameter key 'USE_TMA' is unknown: the keys are BLOCK_SIZE_M, "),
    ],
)
def test_a_fixed_parameter_that_is_not_searched_is_refused(name: str, said: str, recording: Recording) -> None:
    """Optuna's own sampler passes over it."""
    problem = problem_of(recording, cells=(CELL,), trials=TRIALS)
    with pytest.raises(InvalidInputError, match=said):
        OptunaStrategy(problem, PartialFixedSampler({name: 16}, RandomSampler()))
    OptunaStrategy(problem, PartialFixedSampler({"BLOCK_SIZE_M": 16}, RandomSampler()))
