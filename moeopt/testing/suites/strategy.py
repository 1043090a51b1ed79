"""Suite for a search strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.measure.base import Device
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.recordings.shipped import shipped_recordings
from moeopt.search.strategy import SearchProblem, Strategy
from moeopt.testing.faults import FaultyDevice


def search_problem(recording: Recording, **changes: Any) -> SearchProblem:
    """What a tune of a recording would be given, without a prior.

    Args:
        recording: What is tuned.
        **changes: Fields of the problem; ``batch_sizes`` in the place of ``cells``.
    """
    spec = RecordedDevice(recording).spec
    space = changes.pop("space", None) or SearchSpace.grid(recording.shape)
    roles: tuple[Any, ...] = ("joint",) if changes.get("mode") == "joint" else ROLES
    cells = tuple(Cell(role, m) for m in changes.pop("batch_sizes", recording.batch_sizes) for role in roles)
    values = {"mode": "split", "cells": cells, "candidates": tuple(spec.candidates(space.configs())), "trials": 12}
    return SearchProblem(shape=recording.shape, gpu=recording.gpu, space=space, **{**values, **changes})


def play(strategy: Strategy, device: Device) -> list[list[Measurement]]:
    """Asks, measures and tells to the end; returns the measurements of every generation."""
    generations: list[list[Measurement]] = []
    while jobs := strategy.ask():
        assert len(generations) < 1000, "the strategy does not end"
        generations.append([])
        for measurement in device.measure(jobs, strategy.race):
            strategy.tell([measurement])
            generations[-1].append(measurement)
    return generations


def flat(generations: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """All measurements in the order in which they were told."""
    return [measurement for generation in generations for measurement in generation]


class StrategyTestCase:
    """What moeopt expects of a :class:`~moeopt.search.strategy.Strategy`: override ``make_strategy``."""

    @pytest.fixture
    def make_strategy(self) -> Callable[[SearchProblem], Strategy]:
        """Makes a strategy."""
        raise NotImplementedError("override make_strategy: it makes the strategy that the suite is for")

    @pytest.fixture
    def recording(self) -> Recording:
        """What is tuned: one that moeopt ships."""
        return Recording.load(next(iter(shipped_recordings().values())))

    @pytest.fixture
    def device(self, recording: Recording) -> RecordedDevice:
        """The recording as a device."""
        return RecordedDevice(recording)

    @pytest.fixture
    def problem(self, recording: Recording) -> SearchProblem:
        """Nine trials for each role of two batch sizes, among some configs."""
        problem = search_problem(recording, batch_sizes=recording.batch_sizes[:2], trials=9)
        return replace(problem, candidates=problem.candidates[:: -(-len(problem.candidates) // 150)])

    @pytest.fixture
    def few(self, problem: SearchProblem) -> SearchProblem:
        """More trials than configs."""
        return replace(problem, cells=problem.cells[:2], candidates=problem.candidates[::9], trials=500)

    def test_the_budget_is_used_and_nothing_is_asked_twice(
        self, make_strategy: Callable[[SearchProblem], Strategy], problem: SearchProblem, device: RecordedDevice
    ) -> None:
        strategy = make_strategy(problem)
        found = flat(play(strategy, device))
        jobs = [m.job for m in found]
        assert len(set(jobs)) == len(jobs), "a job was asked twice"
        assert {job.config for job in jobs} <= set(problem.candidates), "a config was asked that is not a candidate"
        timed = Counter(m.job.cell for m in found if m.us)
        assert timed == dict.fromkeys(problem.cells, problem.trials), "the trials are a hard limit, and are used"
        for batch_size, chosen in strategy.choose().items():
            assert {role: m.job.cell for role, m in chosen.items()} == {r: Cell(r, batch_size) for r in ROLES}
            assert chosen["up"].job.config.block_size_m == chosen["down"].job.config.block_size_m
            assert all(m.status == "ok" for m in chosen.values())

    def test_the_same_problem_gives_the_same_jobs(
        self, make_strategy: Callable[[SearchProblem], Strategy], problem: SearchProblem, device: RecordedDevice
    ) -> None:
        first, second = (play(make_strategy(problem), device) for _ in range(2))
        assert first == second

    def test_the_order_of_answers_does_not_matter(
        self, make_strategy: Callable[[SearchProblem], Strategy], problem: SearchProblem, device: RecordedDevice
    ) -> None:
        sequences: list[list[list[Job]]] = [[], []]
        for order, sequence in zip((1, -1), sequences, strict=True):
            strategy = make_strategy(problem)
            while jobs := strategy.ask():
                sequence.append(sorted(jobs))
                answers = list(device.measure(jobs))
                for answer in answers[::order]:
                    strategy.tell([answer])
        assert sequences[0] == sequences[1]

    def test_it_ends_when_all_configs_have_been_tried(
        self, make_strategy: Callable[[SearchProblem], Strategy], few: SearchProblem, device: RecordedDevice
    ) -> None:
        jobs = [m.job for m in flat(play(make_strategy(few), device))]
        assert len(set(jobs)) == len(jobs)
        assert set(jobs) == {Job(cell, config) for cell in few.cells for config in few.candidates}

    def test_what_is_known_counts_and_is_not_asked_again(
        self, make_strategy: Callable[[SearchProblem], Strategy], problem: SearchProblem, device: RecordedDevice
    ) -> None:
        half = replace(problem, trials=problem.trials // 2)
        first = make_strategy(half)
        before = flat(play(first, device))
        known = {cell: [m for m in before if m.job.cell == cell] for cell in problem.cells}
        second = make_strategy(replace(problem, known=known, seed=1))
        after = [m.job for m in flat(play(second, device))]
        assert not set(after) & {m.job for m in before}
        assert {second.left(cell) for cell in problem.cells} == {0}
        done = make_strategy(replace(half, known=known))
        assert done.ask() == []
        assert done.choose() == first.choose()

    def test_one_config_for_both_projections(
        self, make_strategy: Callable[[SearchProblem], Strategy], problem: SearchProblem, device: RecordedDevice
    ) -> None:
        sizes = sorted({cell.batch_size for cell in problem.cells})
        strategy = make_strategy(replace(problem, mode="joint", cells=tuple(Cell("joint", m) for m in sizes)))
        play(strategy, device)
        chosen = strategy.choose()
        assert sorted(chosen) == sizes
        assert all(set(parts) == {"joint"} for parts in chosen.values())

    def test_failures_cost_no_trial_and_are_not_asked_again(
        self, make_strategy: Callable[[SearchProblem], Strategy], problem: SearchProblem, device: RecordedDevice
    ) -> None:
        faults = dict.fromkeys(problem.candidates[::4], "crash")
        strategy = make_strategy(problem)
        found = flat(play(strategy, FaultyDevice(device, faults)))  # type: ignore[arg-type]  # a word of Fault
        assert len({m.job for m in found}) == len(found)
        assert Counter(m.job.cell for m in found if m.us) == dict.fromkeys(problem.cells, problem.trials)
        assert not {m.job.config for parts in strategy.choose().values() for m in parts.values()} & set(faults)
