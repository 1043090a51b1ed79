"""moeopt's own search: one surrogate for all batch sizes and both roles, ranked over all legal configs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.core.config import COLUMN, config_table
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.search.acquisition import Shortlist, pick, sample
from moeopt.search.failures import FAILED_EXCESS, chance_to_compile
from moeopt.search.features import cell_features, config_features, squash
from moeopt.search.prior import make_prior
from moeopt.search.pruner import RacingPruner
from moeopt.search.race import PrunerRace
from moeopt.search.strategy import SearchProblem, Strategy
from moeopt.search.surrogate import Surrogate

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from optuna.pruners import BasePruner

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LatticeOptions:
    """What the search can be asked to do otherwise. The defaults are for a tune on a GPU.

    Attributes:
        generations: In how many the trials are spent; each waits for the compiler once.
        smallest: Fewest configs per cell in the first generation.
        most_configs: Distinct configs that may be compiled.
        configs_per_trial: The same per trial of a cell, where that makes more.
        discount: What the gain of a config that must be compiled first counts for.
        compile_cost: Gain in the first generation that is worth compiling one more config.
        shortlist: Configs per cell whose covariance is looked at.
        samples: Of the surrogate, per config.
        tails_from: Configs tried in a cell from which on the surrogate is sampled from Student's t distribution, not
            the normal one: what it is sure is slow gets a chance. Earlier there is better to do.
        freedom: Degrees of freedom of that distribution; infinite for the normal one throughout.
        fit_at: Generations before which the hyperparameters are fitted.
        enough: A cell with less expected improvement than this is left alone. At 0.005 the regret on recordings
            is three times as large (benchmarks/results/search.md), so it is off.
        roofline: A batch size at this share of its roofline is left alone once little is to be expected.
        little: What that is, as expected improvement.
        pool: Most configs that are ranked; of a larger space the best by prior mean.
        tiles_until: Generations in which a cell tries no two configs that differ in GROUP_SIZE_M alone, where
            there are no recordings to learn from: with them the surrogate knows what GROUP_SIZE_M is worth.
        portfolio_bonus: How much faster (in the log) a config of the portfolio is expected to be.
    """

    generations: int = 7
    smallest: int = 4
    most_configs: int = 144
    configs_per_trial: int = 6
    discount: float = 0.7
    compile_cost: float = 0.004
    shortlist: int = 32
    samples: int = 256
    tails_from: int = 12
    freedom: float = 5.0
    fit_at: tuple[int, ...] = (1, 3)
    enough: float = 0.0
    roofline: float = 0.98
    little: float = 0.002
    pool: int = 8000
    portfolio_bonus: float = 0.15
    tiles_until: int = 5


_FIRST_SHARE: Final = 3  # the first generation may use a third of the configs that may be compiled
_COMPILED: Final = 12  # configs of every shortlist that have been compiled for other cells
_UNKNOWN: Final = 1.0  # in the log: how bad it is to have nothing at all


class LatticeStrategy(Strategy):
    """Gaussian-process search over the lattice of legal configs, for all cells together.

    Every generation conditions the surrogate on all that is known, and picks for every cell the batch
    with the greatest expected improvement of its batch size's sum: a config counts only as far as its
    BLOCK_SIZE_M is good for the other role, too.

    Args:
        problem: What to search.
        pruner: Ends the timing of a config; by default :class:`~moeopt.search.pruner.RacingPruner`.
        options: How to search.
    """

    def __init__(
        self, problem: SearchProblem, pruner: BasePruner | None = None, options: LatticeOptions | None = None
    ) -> None:
        super().__init__(problem)
        self.options = options or LatticeOptions()
        self._race = PrunerRace(pruner or RacingPruner(), self.ledger)
        self._rng = np.random.default_rng(problem.seed)
        self._generation = 0
        self._asked: set[Job] = set()
        self._cells = problem.cells
        position = {cell: i for i, cell in enumerate(self._cells)}
        other = {"up": "down", "down": "up"}
        self._partner = [
            position.get(Cell(other[c.role], c.batch_size)) if c.role in other else None  # type: ignore[arg-type]
            for c in self._cells
        ]
        self._make_pool(problem)

    def _make_pool(self, problem: SearchProblem) -> None:
        table = config_table(problem.candidates)
        prior = make_prior(problem.shape, problem.gpu, self._cells, table, problem.landscapes)
        listed = set(problem.portfolio)
        first = np.array([c in listed for c in problem.candidates])
        configs = list(problem.candidates)
        keep = np.arange(len(configs))
        if len(configs) > self.options.pool:
            each = max(64, self.options.pool // len(self._cells))
            best = np.argpartition(prior.mean, each, axis=1)[:, :each]
            known = {c for cell in self._cells for c in self.ledger.rows(cell)}
            there = np.flatnonzero(first | np.array([c in known for c in configs]))
            keep = np.unique(np.concatenate([best.ravel(), there]))
            configs = [configs[i] for i in keep]
        table, mean, first = table[keep], prior.mean[:, keep], first[keep]
        self._configs = configs
        self._index = {c: i for i, c in enumerate(configs)}
        self._mean: Floats = mean - self.options.portfolio_bonus * first
        # All but GROUP_SIZE_M, which decides little: what differs in it alone is of one kind.
        tiles = np.delete(table, COLUMN["GROUP_SIZE_M"], axis=1)
        self._tile = np.unique(tiles, axis=0, return_inverse=True)[1]
        self._steps = np.stack([np.unique(column, return_inverse=True)[1] for column in tiles.T], axis=1)
        self._blocks, self._block = np.unique(table[:, 0], return_inverse=True)
        basis = prior.basis(keep)
        self._taught = basis.shape[1] > 0
        self._model = Surrogate(config_features(table), cell_features(self._cells), prior.mean[:, keep], basis)

    # -- the interface ------------------------------------------------------------------------------

    def tell(self, measurements: Sequence[Measurement]) -> None:
        super().tell(measurements)
        self._race.tell(measurements)

    def race(self, job: Job, rounds: Sequence[float]) -> bool:
        return self._race.lost(job, rounds)

    def ask(self) -> list[Job]:
        if self._generation >= 2 * self.options.generations:  # failures have used up a second round
            return []
        quotas, done = self._quotas(), self._at_roofline()
        self._generation += 1
        if not quotas:
            return []
        state = _State(self)
        compiled = {self._index[c] for c in self.ledger.tried() if c in self._index}
        shortlists = self._shortlists(state, quotas, compiled)
        if self._generation > 1:
            shortlists = [
                s
                for s in shortlists
                if s.gains().max(initial=0.0)
                >= (self.options.little if self._cells[s.cell].batch_size in done else self.options.enough)
            ]
        left = max(self.options.most_configs, self.options.configs_per_trial * self.problem.trials) - len(compiled)
        rest = max(1, self.options.generations - self._generation + 1)
        share = -(-left // (rest if self._generation > 1 else _FIRST_SHARE))
        picked = pick(
            shortlists,
            compiled,
            max(0, share),
            self.options.discount if self._generation > 1 else 1.0,
            0.0 if self._generation > 1 else self.options.compile_cost,
        )
        jobs = [Job(self._cells[cell], self._configs[config]) for cell, config in picked]
        self._asked.update(jobs)
        return jobs

    def _quotas(self) -> dict[int, int]:
        """How many configs each cell gets in this generation."""
        rest = max(1, self.options.generations - self._generation)
        least = self.options.smallest if self._generation == 0 else 1
        left = {i: self.left(cell) for i, cell in enumerate(self._cells)}
        return {i: min(max(-(-n // rest), least), n) for i, n in left.items() if n > 0}

    def _at_roofline(self) -> set[int]:
        """Batch sizes that cannot get better by more than a few percent.

        A roofline is measured with other kernels than these: where one of these is faster, it was too
        low, and all are raised until none is under it.
        """
        shares = {}
        for batch_size, chosen in self.choose().items():
            limits = [self.problem.roofline_us.get(m.job.cell) for m in chosen.values()]
            whole = sum(1 for cell in self._cells if cell.batch_size == batch_size)
            if len(chosen) == whole and all(limits):
                shares[batch_size] = sum(us for us in limits if us) / sum(m.median_us for m in chosen.values())
        best = max([1.0, *shares.values()])
        return {batch_size for batch_size, share in shares.items() if share / best >= self.options.roofline}

    # -- one generation -------------------------------------------------------------------------------

    def _shortlists(self, state: _State, quotas: dict[int, int], compiled: set[int]) -> list[Shortlist]:
        targets = state.targets()
        there = np.array(sorted(compiled), dtype=np.int64)
        lists: list[Ints] = []
        near = self._neighbours() if not self._taught else [there[:0]] * len(self._cells)
        for cell in range(len(self._cells)):
            score = state.mean[cell] - targets[cell][self._block]
            score[state.closed[cell]] = np.inf
            if self._tiles_only:
                score[self._twins(cell, score)] = np.inf
            count = min(self.options.shortlist * (2 if state.empty else 1), len(score) - 1)
            best = np.argpartition(score, count)[: max(count, 1)]
            also = there[np.argsort(score[there], kind="stable")[:_COMPILED]]
            some = np.unique(np.concatenate([best, also, near[cell]]))
            lists.append(some[np.isfinite(score[some])] if cell in quotas else some[:0])
        covariances = state.covariances(lists)
        out = []
        for cell, quota in quotas.items():
            configs = lists[cell]
            if not len(configs):
                continue
            target = targets[cell][self._block[configs]]
            late = len(self.ledger.rows(self._cells[cell])) >= self.options.tails_from
            freedom = self.options.freedom if late else math.inf
            out.append(
                Shortlist(
                    cell=cell,
                    configs=configs,
                    samples=sample(
                        state.mean[cell, configs] - target, covariances[cell], self.options.samples, self._rng, freedom
                    ),
                    weight=np.exp(np.minimum(target, 0.0)) * state.share[cell] * state.compiles(configs),
                    current=np.full(self.options.samples, 0.0 if state.begun[cell] else _UNKNOWN),
                    quota=quota,
                    kind=self._tile[configs] if self._tiles_only else configs,
                    first=np.isin(configs, near[cell]),
                    first_turns=self._near_turns,
                )
            )
        return out

    @property
    def _tiles_only(self) -> bool:
        return not self._taught and self._generation <= self.options.tiles_until

    def _twins(self, cell: int, score: Floats) -> NDArray[np.bool_]:
        """Which configs are of a tile that the cell has tried, or not the best of theirs; bool [configs]."""
        tried = [self._index[c] for c in self.ledger.rows(self._cells[cell]) if c in self._index]
        order = np.argsort(score, kind="stable")
        out = np.ones(len(score), dtype=bool)
        out[order[np.unique(self._tile[order], return_index=True)[1]]] = False
        return np.asarray(out | np.isin(self._tile, self._tile[tried]))

    @property
    def _near_turns(self) -> int:
        """How many picks of a cell go to what is a step away from the best: two while tiles are to be settled."""
        return 2 if self.options.generations <= 2 * self._generation and self._tiles_only else 1

    def _neighbours(self) -> list[Ints]:
        """For each cell the untried tiles one step in one parameter from what would be chosen now, as configs.

        What would be chosen is of a BLOCK_SIZE_M that is good for both roles, which the cell's own best
        need not be.
        """
        out = []
        chosen = self.choose()
        for cell in self._cells:
            best = chosen.get(cell.batch_size, {}).get(cell.role)
            near = np.zeros(len(self._configs), dtype=bool)
            if best is not None and best.job.config in self._index:
                near = np.abs(self._steps - self._steps[self._index[best.job.config]]).sum(axis=1) == 1
                tried = [self._index[c] for c in self.ledger.rows(cell) if c in self._index]
                near &= ~np.isin(self._tile, self._tile[tried])
            out.append(np.flatnonzero(near))
        return out


class _State:
    """The posterior of one generation. Times are logs, relative to the cell's best so far."""

    def __init__(self, strategy: LatticeStrategy) -> None:
        s = self._s = strategy
        cells, configs = len(s._cells), len(s._configs)
        self.closed = np.zeros((cells, configs), dtype=bool)
        timed = [s.ledger.timed(cell) for cell in s._cells]
        self.best = np.array([min(t.values(), default=math.nan) for t in timed])
        self.begun = np.isfinite(self.best)
        self.empty = not self.begun.any()
        self.bad = np.array(sorted(s._index[c] for c in s.ledger.failed() if c in s._index), dtype=np.int64)
        self.closed[:, self.bad] = True
        for job in s._asked:
            self.closed[s._cells.index(job.cell), s._index[job.config]] = True
        rows = []
        for i, (cell, times) in enumerate(zip(s._cells, timed, strict=True)):
            for config in s.ledger.rows(cell):
                if config in s._index:
                    self.closed[i, s._index[config]] = True
            rows += [(s._index[c], i, us) for c, us in times.items() if c in s._index]
        self._times = rows
        failed = [
            (s._index[c], i)
            for i, cell in enumerate(s._cells)
            for c, m in sorted(s.ledger.rows(cell).items())
            if m.status in ("failed", "rejected") and c in s._index and self.begun[i]
        ]
        self._failed = np.array(failed, dtype=np.int64).reshape(-1, 2)
        self.mean = s._mean - s._mean.min(axis=1, keepdims=True) if self.empty else self._posterior()
        self._best_per_block()

    def _posterior(self) -> Floats:
        s = self._s
        config = np.array([r[0] for r in self._times], dtype=np.int64)
        cell = np.array([r[1] for r in self._times], dtype=np.int64)
        excess = np.log(np.array([r[2] for r in self._times]) / self.best[cell])
        config, cell = np.append(config, self._failed[:, 0]), np.append(cell, self._failed[:, 1])
        excess = np.append(excess, np.full(len(self._failed), FAILED_EXCESS))
        value = squash(excess) - s._mean[cell, config]
        counts = np.bincount(cell, minlength=len(s._cells))
        level = np.bincount(cell, value, len(s._cells)) / np.maximum(counts, 1)
        level[counts == 0] = level[counts > 0].mean()
        s._model.observe(config, cell, value - level[cell])
        if s._generation - 1 in s.options.fit_at:
            s._model.fit(s._rng)
        return s._model.condition() + level[:, None] + s._mean

    def covariances(self, lists: list[Ints]) -> list[Floats]:
        model = self._s._model
        if self.empty:
            return [model.prior_covariance(configs, cell) for cell, configs in enumerate(lists)]
        return model.covariances(lists)

    def _best_per_block(self) -> None:
        """Per cell and BLOCK_SIZE_M, µs of the best timed and of the best that is to be expected."""
        s = self._s
        scale = np.where(self.begun, self.best, 1.0)
        shape = (len(s._cells), len(s._blocks))
        self.timed_us, self.expected_us = np.full(shape, np.inf), np.full(shape, np.inf)
        for config, cell, us in self._times:
            block = s._block[config]
            self.timed_us[cell, block] = min(self.timed_us[cell, block], us)
        for block in range(shape[1]):
            there = s._block == block
            lowest = np.where(self.closed[:, there], np.inf, self.mean[:, there]).min(axis=1)
            self.expected_us[:, block] = np.minimum(self.timed_us[:, block], scale * np.exp(lowest - 0.02))
        self.share = np.ones(shape[0])

    def targets(self) -> Floats:
        """Per cell and BLOCK_SIZE_M, log of the time under which the batch size's sum gets better."""
        s = self._s
        out = np.zeros(self.timed_us.shape)
        if self.empty:
            return out
        for cell, partner in enumerate(s._partner):
            mine, scale = self.timed_us[cell], self.best[cell] if self.begun[cell] else 1.0
            if partner is None or not (self.begun[cell] and self.begun[partner]):
                continue
            total = (mine + self.timed_us[partner]).min()
            if not np.isfinite(total):  # no BLOCK_SIZE_M in common yet
                total = 1.1 * (self.expected_us[cell] + self.expected_us[partner]).min()
            with np.errstate(invalid="ignore", divide="ignore"):
                out[cell] = np.log(np.maximum(total - self.expected_us[partner], 0.0) / scale)
            self.share[cell] = scale / total
        return np.maximum(out, -20.0)

    def compiles(self, configs: Ints) -> Floats:
        """Chance that each config compiles, float64 [len(configs)]."""
        ran = np.unique(np.array([row[0] for row in self._times], dtype=np.int64))
        return chance_to_compile(self._s._model.x, configs, self.bad, ran)
