"""moeopt's sampler for plain Optuna."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from moeopt.core.config import LaunchConfig, config_table
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell
from moeopt.errors import InvalidInputError
from moeopt.recordings.landscape import Landscape
from moeopt.search.acquisition import Shortlist, sample
from moeopt.search.features import cell_features, config_features, squash
from moeopt.search.prior import make_prior
from moeopt.search.standing import FAILED_EXCESS
from moeopt.search.surrogate import Surrogate

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from optuna.study import Study

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_SHORTLIST: Final = 48
_SAMPLES: Final = 512
_SPREAD: Final = 1.0  # in the log: what a config may be worth before anything is known


class PoolSampler(BaseSampler):
    """Gaussian-process search over an enumerated set of legal launch configs, for one cell.

    Ranks all legal configs that no trial has tried, by the expected improvement of the log of the
    objective. Trials that run are taken into account, so that ``n_jobs`` or several workers do not try
    the same. A pruned trial counts with the median of its rounds; one without rounds, and a failed one,
    as a config that does not compile: its neighbours become less likely.

    The objective must be positive (a time, or a rate with ``direction="maximize"``) and suggest the keys
    of ``space.distributions()``.

    Args:
        space: Whose parameters are suggested.
        configs: The legal configs; others are never suggested.
        shape: With ``gpu`` and ``cell``: what is expected before the first trial comes from the GPU's
            numbers instead of nothing.
        gpu: Where the layer runs.
        cell: Role and batch size.
        landscapes: Recordings of other shapes to learn from (``load_landscapes``).
        seed: Makes the suggestions a function of the study's trials.

    Raises:
        InvalidInputError: There are no configs, one is not of the space, or of shape, gpu and cell only
            some are given.

    Example:
        >>> import optuna
        >>> from moeopt import MoEShape, SearchSpace
        >>> shape = MoEShape(num_experts=8, top_k=2, hidden_size=1024, intermediate_size=512)
        >>> space = SearchSpace.grid(shape)
        >>> study = optuna.create_study(sampler=PoolSampler(space, space.configs(), seed=1))
        >>> def objective(trial):
        ...     return 10.0 + abs(trial.params["BLOCK_SIZE_M"] - 64)
        >>> for _ in range(20):
        ...     trial = study.ask(space.distributions())
        ...     _ = study.tell(trial, objective(trial))
        >>> study.best_params["BLOCK_SIZE_M"]
        64
    """

    def __init__(
        self,
        space: SearchSpace,
        configs: Sequence[LaunchConfig],
        *,
        shape: MoEShape | None = None,
        gpu: GpuSpec | None = None,
        cell: Cell | None = None,
        landscapes: Sequence[Landscape] = (),
        seed: int | None = None,
    ) -> None:
        if not configs:
            raise InvalidInputError("there are no configs to sample from: give at least one legal config")
        outside = next((c for c in configs if not space.contains(c)), None)
        if outside is not None:
            raise InvalidInputError(f"config {outside} is not of the search space {space.name!r}: give configs of it")
        self._given = (tuple(configs), shape, gpu, tuple(landscapes))
        self._space = space
        self._distributions = space.distributions()
        self._configs = tuple(dict.fromkeys(configs))
        self._index = {c: i for i, c in enumerate(self._configs)}
        self._rng = np.random.default_rng(seed)
        self._independent = RandomSampler(seed=seed)
        table = config_table(self._configs)
        mean, basis = np.zeros((1, len(self._configs))), np.zeros((len(self._configs), 0))
        if shape is not None and gpu is not None and cell is not None:
            prior = make_prior(shape, gpu, (cell,), table, landscapes)
            mean, basis = prior.mean, prior.basis(np.arange(len(self._configs)))
        elif not (shape is None and gpu is None and cell is None):
            raise InvalidInputError("shape, gpu and cell go together: give all of them or none")
        self._model = Surrogate(config_features(table), cell_features((cell or Cell("up", 1),)), mean, basis)
        self._mean: Floats = mean[0]

    def for_cell(self, cell: Cell, seed: int) -> PoolSampler:
        """The same sampler for another cell, with another seed; what is expected of configs is the cell's own."""
        configs, shape, gpu, landscapes = self._given
        where = cell if shape is not None else None
        return PoolSampler(self._space, configs, shape=shape, gpu=gpu, cell=where, landscapes=landscapes, seed=seed)

    def reseed_rng(self) -> None:
        self._rng = np.random.default_rng()
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if not search_space.keys() <= self._distributions.keys():  # not of launch configs, or of more than them
            return {
                name: self.sample_independent(study, trial, name, distribution)
                for name, distribution in search_space.items()
            }
        self._raise_error_if_multi_objective(study)
        params = self._space.params(self._configs[self._suggest(study, trial)])
        return {name: params[name] for name in search_space}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        self._raise_error_if_multi_objective(study)
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    # -- from trials to a suggestion ------------------------------------------------------------------

    def _suggest(self, study: Study, trial: FrozenTrial) -> int:
        times, failed, running = self._history(study, trial)
        taken = np.array(sorted({*times, *failed, *running}), dtype=np.int64)
        free = np.ones(len(self._configs), dtype=bool)
        free[taken] = False
        if not free.any():  # all have been tried: any may be tried again
            return int(self._rng.integers(len(self._configs)))
        mean = self._posterior(times, failed)
        # The best by mean, and as many at random: what is far from all that is known deserves a look, too.
        open_ = self._rng.permutation(np.flatnonzero(free))
        best = open_[np.argsort(mean[open_], kind="stable")[:_SHORTLIST]]
        near = np.unique(np.concatenate([best, open_[:_SHORTLIST]]))
        in_flight = np.array(sorted(running), dtype=np.int64)
        configs = np.concatenate([near, in_flight])
        covariance = self._model.covariances([configs])[0] if times else self._model.prior_covariance(configs, 0)
        shortlist = Shortlist(
            cell=0,
            configs=configs,
            samples=sample(mean[configs], covariance, _SAMPLES, self._rng),
            weight=np.ones(len(configs)),
            current=np.full(_SAMPLES, 0.0 if times else _SPREAD),
            quota=1,
        )
        for position in range(len(near), len(configs)):  # what runs may turn out to be the best itself
            shortlist.choose(position)
        return int(configs[int(np.argmax(shortlist.gains()))])

    def _posterior(self, times: Mapping[int, float], failed: set[int]) -> Floats:
        """Expected log of each config's time over the best so far."""
        if not times:
            return np.asarray(self._mean - self._mean.min())
        best = min(times.values())
        excess = {**dict.fromkeys(failed, FAILED_EXCESS), **{i: t - best for i, t in times.items()}}
        config = np.array(sorted(excess), dtype=np.int64)
        value = squash(np.array([excess[int(i)] for i in config])) - self._mean[config]
        level = float(value.mean())
        mean = self._model.condition(config, np.zeros(len(config), dtype=np.int64), value - level)
        return np.asarray(mean[0] + level + self._mean)

    def _history(self, study: Study, current: FrozenTrial) -> tuple[dict[int, float], set[int], set[int]]:
        """Log times, failures and configs in flight, by index of config."""
        sign = -1.0 if study.direction == StudyDirection.MAXIMIZE else 1.0
        times: dict[int, float] = {}
        failed: set[int] = set()
        running: set[int] = set()
        for trial in study.get_trials(deepcopy=False):
            index = self._index_of(trial)
            if index is None or trial.number == current.number:
                continue
            if trial.state in (TrialState.RUNNING, TrialState.WAITING):
                running.add(index)
                continue
            value = trial.value if trial.state == TrialState.COMPLETE else _median(trial.intermediate_values)
            if value is None:
                failed.add(index)
                continue
            if not value > 0.0:
                raise InvalidInputError(
                    f"trial {trial.number} has the value {value!r}: PoolSampler needs positive ones"
                )
            times[index] = min(times.get(index, math.inf), sign * math.log(value))
        return times, failed - set(times), running - set(times)

    def _index_of(self, trial: FrozenTrial) -> int | None:
        params = trial.params or trial.system_attrs.get("fixed_params", {})
        if any(key not in params for key in self._distributions):
            return None
        return self._index.get(self._space.config(params))


def _median(values: Mapping[int, float]) -> float | None:
    return float(np.median(list(values.values()))) if values else None


LatticeSampler = PoolSampler  # its first name
