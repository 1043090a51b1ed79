"""The racing pruner, alone and in plain Optuna."""

from __future__ import annotations

import optuna
import pytest

from moeopt.errors import InvalidInputError
from moeopt.search.pruner import RacingPruner

INCUMBENT = (100.0, 101.0, 99.0, 100.5, 99.5)


@pytest.mark.parametrize(
    ("rounds", "lost"),
    [
        ([131.0], True),
        ([129.0], False),
        ([131.0, 129.0], True),
        ([104.0, 104.5, 104.2], False),  # within the margin: timed in full, however sure
        ([112.0, 111.8, 112.1], True),
        ([112.0, 90.0, 130.0], False),  # noisy: the gap may be chance
        ([], False),
    ],
)
def test_lost(rounds: list[float], lost: bool) -> None:
    assert RacingPruner().lost(rounds, INCUMBENT) is lost


def test_nothing_is_lost_without_an_incumbent() -> None:
    assert not RacingPruner().lost([1e9], ())


def study_with(direction: str, *trials: tuple[float, ...]) -> optuna.Study:
    study = optuna.create_study(direction=direction, pruner=RacingPruner())
    for rounds in trials:
        study.add_trial(
            optuna.trial.create_trial(value=sum(rounds) / len(rounds), intermediate_values=dict(enumerate(rounds)))
        )
    return study


@pytest.mark.parametrize(("us", "pruned"), [(140.0, True), (120.0, False)])
def test_races_against_the_best_trial_of_a_study(us: float, pruned: bool) -> None:
    study = study_with("minimize", (300.0, 300.0), (100.0, 101.0))
    trial = study.ask()
    trial.report(us, step=0)
    assert trial.should_prune() is pruned


@pytest.mark.parametrize(("rate", "pruned"), [(70.0, True), (80.0, False)])
def test_races_rates_where_more_is_better(rate: float, pruned: bool) -> None:
    study = study_with("maximize", (10.0, 10.0), (100.0, 100.0))
    trial = study.ask()
    trial.report(rate, step=0)
    assert trial.should_prune() is pruned


def test_the_first_trial_and_one_without_rounds_go_on() -> None:
    study = study_with("minimize")
    trial = study.ask()
    assert not trial.should_prune()
    trial.report(5.0, step=0)
    assert not trial.should_prune()


def test_optimise_prunes_after_one_round() -> None:
    rounds = []

    def objective(trial: optuna.Trial) -> float:
        slow = 1.0 + trial.suggest_int("slow", 0, 1) * (trial.number > 0)
        for step in range(4):
            trial.report(10.0 * slow, step)
            if trial.should_prune():
                rounds.append(step + 1)
                raise optuna.TrialPruned
        rounds.append(4)
        return 10.0 * slow

    study = optuna.create_study(pruner=RacingPruner(), sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=12)
    assert set(rounds) == {1, 4}
    pruned = [t for t in study.trials if t.state == optuna.trial.TrialState.PRUNED]
    assert all(len(t.intermediate_values) == 1 for t in pruned)


@pytest.mark.parametrize("arguments", [{"factor": 1.0}, {"factor": float("nan")}, {"margin": -1.0}, {"sigmas": -0.1}])
def test_senseless_arguments_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError):
        RacingPruner(**arguments)
