"""The strategy of a tune: moeopt's own search, or any Optuna sampler's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeopt.search.strategy import SearchProblem, Strategy

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler


def make_strategy(
    problem: SearchProblem, sampler: BaseSampler | None = None, pruner: BasePruner | None = None
) -> Strategy:
    """The strategy of a tune.

    Args:
        problem: What to search.
        sampler: Any Optuna sampler, or None for moeopt's own.
        pruner: Any Optuna pruner, or None for :class:`moeopt.search.pruner.RacingPruner`.
    """
    from moeopt.search.optuna_strategy import OptunaStrategy
    from moeopt.search.pool_search import PoolSearch

    if sampler is None:
        return PoolSearch(problem, pruner)
    return OptunaStrategy(problem, sampler, pruner)
