"""Strategies: asked for jobs in generations, told their measurements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import InvalidInputError
from moeopt.search.ledger import Ledger

if TYPE_CHECKING:
    from moeopt.recordings.landscape import Landscape


@dataclass(frozen=True)
class SearchProblem:
    """All that a strategy may know at the start.

    Attributes:
        shape: The layer.
        gpu: Where it runs.
        space: What ``candidates`` were enumerated from.
        mode: ``split``: a config for each role, with a shared BLOCK_SIZE_M; ``joint``: one for both.
        cells: What gets a config each.
        candidates: The legal configs, none twice.
        trials: Launch configs that may be timed per cell, those of ``known`` included.
        seed: Of all random choices.
        known: Measurements from an earlier run.
        portfolio: Tried first, best first; what is not among the candidates is passed over.
        defaults: What an engine uses where it finds no file. A stock sampler starts from it; the lattice
            search has better starts.
        landscapes: Recordings of other shapes, as a prior (see :mod:`moeopt.recordings.landscape`).
    """

    shape: MoEShape
    gpu: GpuSpec
    space: SearchSpace
    mode: Literal["split", "joint"]
    cells: tuple[Cell, ...]
    candidates: tuple[LaunchConfig, ...]
    trials: int
    seed: int = 0
    known: Mapping[Cell, Sequence[Measurement]] = field(default_factory=dict)
    portfolio: Sequence[LaunchConfig] = ()
    defaults: Mapping[Cell, LaunchConfig] = field(default_factory=dict)
    landscapes: Sequence[Landscape] = ()

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InvalidInputError(f"trials is {self.trials!r}: give a whole number of at least 1")
        if not self.cells or not self.candidates:
            what = "batch sizes" if not self.cells else "legal launch configs"
            raise InvalidInputError(f"there are no {what} to search: give at least one")


class Strategy(ABC):
    """Picks what to time next.

    The tuner calls :meth:`ask`, times all jobs, calls :meth:`tell` (once, or as each is done: the
    order does not matter to the next :meth:`ask`), and begins again until :meth:`ask` gives nothing.
    What is asked is a function of the problem and of what has been told, never of time.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.ledger = Ledger(problem.cells)
        for cell in problem.cells:
            self.ledger.add(problem.known.get(cell, ()))

    @abstractmethod
    def ask(self) -> list[Job]:
        """The next generation of jobs; an empty list says that the search is over."""

    def tell(self, measurements: Sequence[Measurement]) -> None:
        """Takes the answers in."""
        self.ledger.add(measurements)

    @abstractmethod
    def race(self, job: Job, rounds: Sequence[float]) -> bool:
        """Whether to stop timing this job, given its rounds so far (µs)."""

    def choose(self) -> dict[int, dict[str, Measurement]]:
        """Per batch size and role (``up`` and ``down``, or ``joint``) the best found so far.

        In split mode the sum of both roles is smallest, with a shared BLOCK_SIZE_M. May be called at
        any time; a batch size of which nothing has been timed in full is missing.
        """
        return self.ledger.choose()

    def left(self, cell: Cell) -> int:
        """Launch configs that may still be timed in a cell."""
        return max(0, self.problem.trials - sum(1 for m in self.ledger.rows(cell).values() if m.us))
