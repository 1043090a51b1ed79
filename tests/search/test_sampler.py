"""LatticeSampler in plain Optuna."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from moeopt.core.config import LaunchConfig
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell
from moeopt.errors import InvalidInputError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import load_landscapes
from moeopt.search.sampler import LatticeSampler
from tests.conftest import synthetic_us
from tests.search.replay import RECORDINGS

SPACE = SearchSpace(
    "small",
    {
        "BLOCK_SIZE_M": (16, 32, 64),
        "BLOCK_SIZE_N": (32, 64, 128),
        "BLOCK_SIZE_K": (64, 128),
        "GROUP_SIZE_M": (1, 16),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
    },
)
LEGAL = tuple(c for c in SPACE.configs() if not (c.block_size_m == 64 and c.block_size_n == 128))


def suggest(trial: optuna.Trial) -> LaunchConfig:
    rows = {key: d for key, d in SPACE.distributions().items() if isinstance(d, IntDistribution)}
    return SPACE.config({key: trial.suggest_int(key, d.low, d.high, log=d.log) for key, d in rows.items()})


def us(config: LaunchConfig) -> float:
    return synthetic_us(SPACE.params(config), "up", 16)


def study_of(
    seed: int | None = 0, direction: str = "minimize", configs: tuple[LaunchConfig, ...] = LEGAL
) -> optuna.Study:
    return optuna.create_study(sampler=LatticeSampler(SPACE, configs, seed=seed), direction=direction)


def asked(study: optuna.Study) -> list[LaunchConfig]:
    return [SPACE.config(t.params) for t in study.trials]


def test_finds_the_best_of_128_in_30_and_never_repeats() -> None:
    study = study_of()
    study.optimize(lambda trial: us(suggest(trial)), n_trials=30)
    best = min(map(us, LEGAL))
    assert study.best_value < 1.01 * best
    configs = asked(study)
    assert len(set(configs)) == 30
    assert set(configs) <= set(LEGAL)


def test_better_than_random_and_tpe() -> None:
    best = min(map(us, LEGAL))

    def mean_excess(make: Callable[[int], optuna.samplers.BaseSampler]) -> float:
        out = []
        for seed in range(6):
            study = optuna.create_study(sampler=make(seed))
            study.optimize(lambda trial: us(c) if (c := suggest(trial)) in LEGAL else math.inf, n_trials=20)
            out.append(study.best_value / best - 1)
        return sum(out) / len(out)

    ours = mean_excess(lambda seed: LatticeSampler(SPACE, LEGAL, seed=seed))
    assert ours < mean_excess(lambda seed: optuna.samplers.RandomSampler(seed=seed))
    assert ours < mean_excess(lambda seed: optuna.samplers.TPESampler(seed=seed))


def test_a_seed_makes_it_repeatable() -> None:
    runs = []
    for seed in (3, 3, 4):
        study = study_of(seed)
        study.optimize(lambda trial: us(suggest(trial)), n_trials=12)
        runs.append(asked(study))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_rates_are_maximised() -> None:
    study = study_of(direction="maximize")
    study.optimize(lambda trial: 1e6 / us(suggest(trial)), n_trials=30)
    assert study.best_value > 0.99 * 1e6 / min(map(us, LEGAL))


def test_what_runs_is_not_suggested_again() -> None:
    study = study_of()
    trials = [study.ask(SPACE.distributions()) for _ in range(12)]
    assert len({SPACE.config(t.params) for t in trials}) == 12
    for trial in trials:
        study.tell(trial, us(SPACE.config(trial.params)))
    more = [study.ask(SPACE.distributions()) for _ in range(6)]
    assert len({SPACE.config(t.params) for t in [*trials, *more]}) == 18


def test_failures_are_not_repeated_and_their_region_is_left() -> None:
    study = study_of()
    bad = 0
    for _ in range(40):
        trial = study.ask(SPACE.distributions())
        config = SPACE.config(trial.params)
        if config.block_size_n == 128:
            bad += 1
            study.tell(trial, state=TrialState.FAIL if bad % 2 else TrialState.PRUNED)
        else:
            study.tell(trial, us(config))
    assert len(set(asked(study))) == 40
    assert bad / 40 <= 0.8 * sum(c.block_size_n == 128 for c in LEGAL) / len(LEGAL)


def test_a_pruned_trial_counts_with_its_rounds() -> None:
    """All but the first are pruned after two rounds, and the search still gets to the best."""
    study = study_of()

    def objective(trial: optuna.Trial) -> float:
        value = us(suggest(trial))
        trial.report(value * 1.01, 0)
        trial.report(value * 0.99, 1)
        if trial.number:
            raise optuna.TrialPruned
        return value

    study.optimize(objective, n_trials=30)
    best = min(sum(t.intermediate_values.values()) / 2 for t in study.trials)
    assert best < 1.01 * min(map(us, LEGAL))


def test_queued_trials_come_first_and_count() -> None:
    study = study_of()
    study.enqueue_trial(SPACE.params(LEGAL[5]))
    study.optimize(lambda trial: us(suggest(trial)), n_trials=10)
    assert asked(study)[0] == LEGAL[5]
    assert len(set(asked(study))) == 10


def test_goes_on_when_everything_has_been_tried() -> None:
    few = LEGAL[:5]
    study = study_of(configs=few)
    study.optimize(lambda trial: us(suggest(trial)), n_trials=8)
    assert set(asked(study)) == set(few)
    assert len(study.trials) == 8


def test_other_parameters_are_left_to_random_sampling() -> None:
    study = study_of()

    def objective(trial: optuna.Trial) -> float:
        return us(suggest(trial)) + trial.suggest_float("extra", 0.0, 1.0)

    study.optimize(objective, n_trials=6)
    assert len({t.params["extra"] for t in study.trials}) == 6


def test_a_gpu_and_recordings_give_a_better_start(tiny_recording: Callable[..., Path]) -> None:
    recording = Recording.load(RECORDINGS / "h200-E256-top8-K3072-N256-bf16.jsonl.gz")
    space = SearchSpace.grid(recording.shape)
    configs = RecordedDevice(recording).spec.candidates(space.configs())
    landscapes = load_landscapes(RECORDINGS, exclude_shape=recording.shape)
    cell = Cell("down", 64)
    times = {c: statistics.median(row.roles["down"].us[64]) for c, row in recording.rows.items() if row.status == "ok"}
    found = {}
    for name, known in {
        "nothing": {},
        "all": {"shape": recording.shape, "gpu": recording.gpu, "cell": cell, "landscapes": landscapes},
    }.items():
        study = optuna.create_study(sampler=LatticeSampler(space, configs, seed=0, **known))  # type: ignore[arg-type]
        for _ in range(4):
            trial = study.ask(space.distributions())
            us_ = times.get(space.config(trial.params))
            study.tell(trial, us_, state=None if us_ else TrialState.FAIL)
        found[name] = study.best_value / min(times.values())
    assert found["all"] < 1.1
    assert found["all"] < found["nothing"]


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no configs"):
        LatticeSampler(SPACE, ())
    with pytest.raises(InvalidInputError, match="not of the search space"):
        LatticeSampler(SPACE, [LaunchConfig(16, 32, 64, 1, 4, 5)])
    with pytest.raises(InvalidInputError, match="go together"):
        LatticeSampler(SPACE, LEGAL, cell=Cell("up", 16))
    study = study_of()
    trial = study.ask(SPACE.distributions())
    study.tell(trial, -1.0)
    with pytest.raises(InvalidInputError, match="positive"):
        study.ask(SPACE.distributions())
