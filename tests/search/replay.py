"""Helpers: a search problem from a recording, and a strategy run to its end on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeopt.core.space import SearchSpace
from moeopt.core.trial import Job, Measurement
from moeopt.recordings.format import Recording
from moeopt.search.strategy import SearchProblem
from moeopt.testing.suites.strategy import flat, search_problem

RECORDINGS = Path(__file__).parents[2] / "studies" / "recordings"


def problem_of(recording: Recording, **changes: Any) -> SearchProblem:
    """What a tune of the recording would be given, of the space that it holds; keyword arguments replace fields."""
    space = SearchSpace("recorded", {k: tuple(v) for k, v in (recording.header.space or {}).items()})
    return search_problem(recording, **{"space": space, **changes})


def jobs_of(generations: list[list[Measurement]]) -> list[Job]:
    """All jobs in the order they were asked."""
    return [m.job for m in flat(generations)]
