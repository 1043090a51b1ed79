"""Optuna's own published suites over moeopt's sampler and pruner, and both on studies that a tune stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pruners import DeterministicPruner
from optuna.testing.pytest_samplers import BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase
from optuna.trial import TrialState

import moeopt
from moeopt.core.config import REQUIRED_KEYS
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell
from moeopt.recordings.format import Recording
from moeopt.search.pruner import RacingPruner
from moeopt.search.sampler import LatticeSampler
from tests.conftest import GRID

SPACE = SearchSpace("tiny", dict(GRID))


class TestLatticeSampler(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: LatticeSampler(SPACE, SPACE.configs(), seed=1)


class TestLatticeSamplerWithACostModel(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        shape, gpu = MoEShape(8, 2, 256, 128), moeopt.GpuSpec.by_name("H200")
        return lambda: LatticeSampler(SPACE, SPACE.configs(), shape=shape, gpu=gpu, cell=Cell("up", 16), seed=1)


def _optimise(pruner: optuna.pruners.BasePruner, direction: str, values: list[list[float]]) -> list[TrialState]:
    """Trials that report these values, and end with the last."""
    study = optuna.create_study(direction=direction, pruner=pruner)
    for rounds in values:
        trial = study.ask()
        for step, value in enumerate(rounds):
            trial.report(value, step)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, rounds[-1])
    return [trial.state for trial in study.trials]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
class TestRacingPruner:
    """What Optuna's tests of its pruners ask of each; it publishes no suite for them."""

    def test_the_first_trial_is_never_pruned(self, direction: str) -> None:
        assert _optimise(RacingPruner(), direction, [[5.0, 5.1, 5.0]]) == [TrialState.COMPLETE]

    def test_what_is_better_is_never_pruned(self, direction: str) -> None:
        better = [1.0, 1.01, 1.0] if direction == "minimize" else [9.0, 9.01, 9.0]
        states = _optimise(RacingPruner(), direction, [[5.0, 5.1, 5.0], better])
        assert states == [TrialState.COMPLETE, TrialState.COMPLETE]

    def test_what_is_far_worse_is_pruned(self, direction: str) -> None:
        worse = [50.0, 50.0, 50.0] if direction == "minimize" else [0.5, 0.5, 0.5]
        states = _optimise(RacingPruner(), direction, [[5.0, 5.1, 5.0], worse])
        assert states == [TrialState.COMPLETE, TrialState.PRUNED]

    def test_a_trial_without_a_value_is_not_pruned(self, direction: str) -> None:
        study = optuna.create_study(direction=direction, pruner=RacingPruner())
        study.tell(study.ask(), 1.0)
        assert not study.ask().should_prune()

    def test_nan_does_not_stop_a_study(self, direction: str) -> None:
        study = optuna.create_study(direction=direction, pruner=RacingPruner())
        first = study.ask()
        first.report(1.0, 0)
        study.tell(first, 1.0)
        trial = study.ask()
        trial.report(float("nan"), 0)
        assert trial.should_prune() in (True, False)
        study.tell(trial, state=TrialState.FAIL)


def test_optuna_prunes_by_rule_and_moeopt_tells_it_in_the_same_words(tiny_recording: Callable[..., Path]) -> None:
    """A pruner of Optuna's that prunes everything stops every config after its first round."""
    result = _tune(tiny_recording(), pruner=DeterministicPruner(True))
    assert result.counts.raced_out > 0
    assert _tune(tiny_recording("b.gz"), pruner=DeterministicPruner(False)).counts.raced_out == 0


def _tune(path: Path, **options: object) -> moeopt.TuneResult:
    given = {"trials": 12, "batch_sizes": (1, 16), "storage": str(path.with_suffix(".db")), "progress": False}
    return moeopt.tune(gpu=f"recorded:{path}", **{**given, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("with_model", [False, True], ids=["nothing known", "cost model"])
def test_a_tune_with_the_sampler(tiny_recording: Callable[..., Path], with_model: bool) -> None:
    path = tiny_recording()
    recording = Recording.load(path)
    space = SearchSpace.grid(recording.shape)
    configs = [c for c in space.configs() if c in recording.rows]
    known = {"shape": recording.shape, "gpu": recording.gpu, "cell": Cell("up", 1)} if with_model else {}
    sampler = LatticeSampler(space, configs, seed=3, **known)  # type: ignore[arg-type]
    result = _tune(path, sampler=sampler)
    assert result.batch_sizes == (1, 16)
    for m in result.batch_sizes:
        assert 6 <= result.best(m).up.measured <= 12
    again = _tune(path, sampler=LatticeSampler(space, configs, seed=3, **known))  # type: ignore[arg-type]
    assert again.rows == result.rows
    assert again.counts.measured == 0, "the run is resumed"


def test_the_sampler_goes_on_in_a_study_that_a_tune_stored(tiny_recording: Callable[..., Path]) -> None:
    path = tiny_recording()
    recording = Recording.load(path)
    space = SearchSpace.grid(recording.shape)
    result = _tune(path)
    study = result.study("up", 16)
    tried = {space.config(trial.params) for trial in study.trials}
    assert len(tried) >= 6
    study.sampler = LatticeSampler(space, tuple(recording.rows), seed=1)
    for _ in range(8):
        trial = study.ask(space.distributions())
        config = space.config(trial.params)
        assert config in recording.rows, "legal"
        assert config not in tried, "new"
        tried.add(config)
        row = recording.rows[config]
        if row.status == "ok":
            study.tell(trial, row.roles["up"].us[16][0])
        else:
            study.tell(trial, state=TrialState.FAIL)
    best = min(us for c, row in recording.rows.items() if row.status == "ok" for us in row.roles["up"].us[16])
    assert study.best_value <= 1.05 * best
    assert optuna.importance.get_param_importances(study).keys() == set(REQUIRED_KEYS), "one search space"


@pytest.mark.parametrize("name", ["TPESampler", "RandomSampler", "QMCSampler", "CmaEsSampler", "GPSampler"])
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning", "ignore:.*:UserWarning")
def test_any_sampler_goes_on_in_a_study_that_a_tune_stored(tiny_recording: Callable[..., Path], name: str) -> None:
    if name == "GPSampler":
        pytest.importorskip("torch")
    path = tiny_recording()
    result = _tune(path)
    study = result.study("down", 1)
    count = len(study.trials)
    study.sampler = getattr(optuna.samplers, name)(seed=1)
    trial = study.ask(SearchSpace.grid(Recording.load(path).shape).distributions())
    study.tell(trial, 99.0)
    assert len(study.trials) == count + 1
    resumed = _tune(path)
    assert resumed.counts.measured == 0, "a trial that is not ours is no obstacle"
    assert dataclasses.replace(resumed.best(1).down) == result.best(1).down
