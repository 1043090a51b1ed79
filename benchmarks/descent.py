"""Coordinate descent: the control arm that a search has to beat to be worth its code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moeopt.core.config import CONFIG_KEYS, LaunchConfig
from moeopt.core.trial import Cell, Job
from moeopt.search.pruner import RacingPruner
from moeopt.search.strategy import SearchProblem, Strategy


class CoordinateDescent(Strategy):
    """From the engine's default (or the nearest legal config) moves one parameter by one step at a time.

    Every cell on its own: tries the untried one-step neighbours of its best config in random order,
    moves on as soon as one is better, and from a local optimum jumps to a random config.
    """

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        self._rng = np.random.default_rng(problem.seed)
        self._keys = [key for key, values in problem.space.values.items() if len(values) > 1]
        self._values = {key: sorted(problem.space.values[key]) for key in self._keys}
        self._legal = {self._point(c): c for c in problem.candidates}
        self._centre: dict[Cell, LaunchConfig] = {}
        self._failed: dict[Cell, set[LaunchConfig]] = {cell: set() for cell in problem.cells}
        self._pruner = RacingPruner()

    def _point(self, config: LaunchConfig) -> tuple[int, ...]:
        return tuple(self._values[key].index(getattr(config, CONFIG_KEYS[key])) for key in self._keys)

    def ask(self) -> list[Job]:
        jobs = []
        for cell in self.problem.cells:
            if self.left(cell) and (config := self._next(cell)) is not None:
                jobs.append(Job(cell, config))
        return jobs

    def _next(self, cell: Cell) -> LaunchConfig | None:
        rows = self.ledger.rows(cell)
        best = min(self.ledger.timed(cell).items(), key=lambda item: (item[1], item[0]), default=None)
        if best is None:
            return self._nearest(self.problem.defaults[cell], set(rows)) if cell in self.problem.defaults else None
        centre = best[0]
        if cell in self._centre and self._centre[cell] not in rows:  # should not happen: it was asked for
            return None
        started = self._centre.get(cell)
        if started is not None:  # after a jump: descend from there until it is exhausted
            times = self.ledger.timed(cell)
            near = [c for c in [started, *self._neighbours(started)] if c in times]
            centre = min(near, key=lambda c: (times[c], c), default=started)
            self._centre[cell] = centre
        for candidates in (self._neighbours(centre), self._neighbours(best[0])):
            fresh = [c for c in candidates if c not in rows]
            if fresh:
                return fresh[int(self._rng.integers(len(fresh)))]
        left = [c for c in self.problem.candidates if c not in rows]
        if not left:
            return None
        jump = left[int(self._rng.integers(len(left)))]
        self._centre[cell] = jump
        return jump

    def _neighbours(self, config: LaunchConfig) -> list[LaunchConfig]:
        point = self._point(config)
        out = []
        for axis in range(len(point)):
            for step in (-1, 1):
                moved = (*point[:axis], point[axis] + step, *point[axis + 1 :])
                if moved in self._legal:
                    out.append(self._legal[moved])
        return out

    def _nearest(self, config: LaunchConfig, taken: set[LaunchConfig]) -> LaunchConfig | None:
        def distance(other: LaunchConfig) -> float:
            return sum(
                abs(math.log2(getattr(config, CONFIG_KEYS[k])) - math.log2(getattr(other, CONFIG_KEYS[k])))
                for k in self._keys
            )

        free = [c for c in self.problem.candidates if c not in taken]
        return min(free, key=lambda c: (distance(c), c), default=None)

    def race(self, job: Job, rounds: Sequence[float]) -> bool:
        incumbent = self.ledger.incumbent(job.cell)
        return incumbent is not None and self._pruner.lost(rounds, incumbent.us)
