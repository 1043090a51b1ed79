"""moeopt's own search: one surrogate for all batch sizes and both roles, ranked over the pool of legal configs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.core.trial import Job, Measurement
from moeopt.search.acquisition import Shortlist, pick, sample
from moeopt.search.pruner import RacingPruner
from moeopt.search.race import PrunerRace
from moeopt.search.standing import Pool, Standing
from moeopt.search.strategy import SearchProblem, Strategy

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from optuna.pruners import BasePruner

    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PoolOptions:
    """What the search can be asked to do otherwise. The defaults are for a tune on a GPU.

    Attributes:
        generations: In how many the trials are spent; each waits for the compiler once.
        smallest: Fewest configs per cell in the first generation.
        most_configs: Distinct configs that may be compiled.
        configs_per_trial: The same per trial of a cell, where that makes more.
        discount: What the gain of a config that must be compiled first counts for: below 1, cells settle on the same
            configs. It saves compiling time; on recordings it costs or gains no regret that can be told.
        shortlist: Configs per cell whose covariance is looked at.
        samples: Of the surrogate, per config.
        pool: Most configs that are ranked; of a larger space the best by prior mean.
        portfolio_bonus: How much faster (in the log) a config of the portfolio is expected to be. Not measured: the
            portfolio of this search is of engine files and earlier studies, which recordings do not have.
    """

    generations: int = 7
    smallest: int = 4
    most_configs: int = 144
    configs_per_trial: int = 6
    discount: float = 0.7
    shortlist: int = 32
    samples: int = 256
    pool: int = 8000
    portfolio_bonus: float = 0.15


_UNKNOWN: Final = 1.0  # in the log of time: how bad it is to have nothing at all


class PoolSearch(Strategy):
    """Gaussian-process search over the pool of legal configs, for all cells together.

    Every generation conditions the surrogate on all that is known, and picks for every cell the batch
    with the greatest expected improvement of its batch size's sum: a config counts only as far as its
    BLOCK_SIZE_M is good for the other role, too.

    Args:
        problem: What to search.
        pruner: Ends the timing of a config; by default :class:`~moeopt.search.pruner.RacingPruner`.
        options: How to search.
    """

    def __init__(
        self, problem: SearchProblem, pruner: BasePruner | None = None, options: PoolOptions | None = None
    ) -> None:
        super().__init__(problem)
        self.options = options or PoolOptions()
        self._race = PrunerRace(pruner or RacingPruner(), self.ledger)
        self._rng = np.random.default_rng(problem.seed)
        self._generation = 0
        self._asked: set[Job] = set()
        self._pool = Pool.of(problem, self.ledger, self.options.pool, self.options.portfolio_bonus)

    def tell(self, measurements: Sequence[Measurement]) -> None:
        super().tell(measurements)
        self._race.tell(measurements)

    def race(self, job: Job, rounds: Sequence[float]) -> bool:
        return self._race.lost(job, rounds)

    def ask(self) -> list[Job]:
        if self._generation >= 2 * self.options.generations:  # failures have used up a second round
            return []
        quotas = self._quotas()
        self._generation += 1
        if not quotas:
            return []
        pool = self._pool
        compiled = {pool.index[c] for c in self.ledger.tried() if c in pool.index}
        shortlists = self._shortlists(Standing(pool, self.ledger, self._asked), quotas)
        if self._generation > 1:
            shortlists = [s for s in shortlists if s.gains().max(initial=-1.0) >= 0.0]
        left = max(self.options.most_configs, self.options.configs_per_trial * self.problem.trials) - len(compiled)
        rest = max(1, self.options.generations - self._generation + 1)
        discount = self.options.discount if self._generation > 1 else 1.0
        picked = pick(shortlists, compiled, max(0, -(-left // rest)), discount)
        jobs = [Job(pool.cells[cell], pool.configs[config]) for cell, config in picked]
        self._asked.update(jobs)
        return jobs

    def _quotas(self) -> dict[int, int]:
        """How many configs each cell gets in this generation."""
        rest = max(1, self.options.generations - self._generation)
        least = self.options.smallest if self._generation == 0 else 1
        left = {i: self.left(cell) for i, cell in enumerate(self._pool.cells)}
        return {i: min(max(-(-n // rest), least), n) for i, n in left.items() if n > 0}

    def _shortlists(self, standing: Standing, quotas: dict[int, int]) -> list[Shortlist]:
        """For each cell with a quota the configs of the best expected time, with samples of what they may turn out.

        What counts is the log of a time over that under which the batch size's sum would just get better: an
        improvement in the log is worth the role's share of the sum, and where even a good time is far over the
        target (a BLOCK_SIZE_M that the other role does badly with), exp(target) of it.
        """
        targets = standing.targets()
        lists: list[Ints] = []
        for cell in range(len(self._pool.cells)):
            score = standing.mean[cell] - targets[cell][self._pool.block]
            score[standing.closed[cell]] = np.inf
            count = min(self.options.shortlist * (2 if standing.empty else 1), len(score) - 1)
            best = np.sort(np.argpartition(score, count)[: max(count, 1)])
            lists.append(best[np.isfinite(score[best])] if cell in quotas else best[:0])
        covariances = standing.covariances(lists)
        out = []
        for cell, quota in quotas.items():
            configs = lists[cell]
            if not len(configs):
                continue
            target = targets[cell][self._pool.block[configs]]
            count = self.options.samples
            excess = standing.mean[cell, configs] - target
            out.append(
                Shortlist(
                    cell=cell,
                    configs=configs,
                    samples=sample(excess, covariances[cell], count, self._rng),
                    weight=np.exp(np.minimum(target, 0.0)) * standing.share[cell],
                    current=np.full(count, 0.0 if standing.begun[cell] else _UNKNOWN),
                    quota=quota,
                )
            )
        return out
