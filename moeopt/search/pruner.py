"""A pruner that ends the timing of a launch config as soon as it has clearly lost.

The steps of a trial are rounds of timing, its intermediate values microseconds per launch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optuna.pruners import BasePruner
from optuna.study import StudyDirection
from optuna.trial import TrialState

from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial


class RacingPruner(BasePruner):
    """Races every config against the best one so far of the same study.

    After the first round a config that is ``factor`` times slower than the incumbent's median is
    pruned. From the second round on the noise of the rounds is known: a config is pruned where its
    median is slower than the incumbent's by more than ``sigmas`` standard errors of the difference
    and by more than ``margin``.

    Args:
        factor: Slower than this times the incumbent after one round: pruned.
        margin: From the second round on, the relative gap below which nothing is pruned, so that
            what is close to the best is timed in full.
        sigmas: From the second round on, the gap in standard errors.

    Raises:
        InvalidInputError: ``factor`` is not over 1, or ``margin`` or ``sigmas`` is negative.
    """

    def __init__(self, factor: float = 1.3, *, margin: float = 0.05, sigmas: float = 3.0) -> None:
        if not factor > 1.0:
            raise InvalidInputError(f"factor is {factor!r}: give a number over 1, such as 1.3")
        if margin < 0.0 or sigmas < 0.0:
            raise InvalidInputError(f"margin is {margin!r} and sigmas {sigmas!r}: give numbers of at least 0")
        self.factor = factor
        self.margin = margin
        self.sigmas = sigmas

    def lost(self, rounds: Sequence[float], incumbent: Sequence[float]) -> bool:
        """Whether a config with these rounds has lost against the incumbent's rounds (µs)."""
        if not rounds or not incumbent:
            return False
        best = statistics.median(incumbent)
        if len(rounds) == 1:
            return rounds[0] > self.factor * best
        gap = statistics.median(rounds) - best
        noise = math.sqrt(_variance_of_mean(rounds) + _variance_of_mean(incumbent))
        return gap > self.margin * best and gap > self.sigmas * noise

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Whether the trial has lost against the study's best one."""
        sign = 1.0 if study.direction == StudyDirection.MINIMIZE else -1.0
        rounds = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
        done = [t for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)) if t.intermediate_values]
        if not rounds or not done:
            return False
        best = min(done, key=lambda t: (sign * statistics.median(t.intermediate_values.values()), t.number))
        incumbent = list(best.intermediate_values.values())
        if sign < 0:  # a rate, where more is better: race its reciprocal
            rounds, incumbent = [1.0 / v for v in rounds], [1.0 / v for v in incumbent]
        return self.lost(rounds, incumbent)


def _variance_of_mean(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)
