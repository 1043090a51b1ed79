"""Helpers: a search problem from a recording, and a strategy run to its end on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.search.strategy import SearchProblem, Strategy

RECORDINGS = Path(__file__).parents[2] / "studies" / "recordings"


def problem_of(recording: Recording, *, space: SearchSpace | None = None, mode: str = "split", **changes: Any):
    """What a tune of the recording would be given; keyword arguments replace fields."""
    device = RecordedDevice(recording)
    if space is None:
        space = SearchSpace("recorded", {k: tuple(v) for k, v in (recording.header.space or {}).items()})
    roles = ROLES if mode == "split" else ("joint",)
    cells = tuple(Cell(role, m) for m in changes.pop("batch_sizes", recording.batch_sizes) for role in roles)
    values: dict[str, Any] = {
        "shape": recording.shape,
        "gpu": recording.gpu,
        "space": space,
        "mode": mode,
        "cells": cells,
        "candidates": tuple(device.spec.candidates(space.configs())),
        "trials": 12,
        "seed": 0,
        **changes,
    }
    return SearchProblem(**values)


def run(strategy: Strategy, device: RecordedDevice, *, limit: int = 1000) -> list[list[Measurement]]:
    """Asks, measures and tells to the end; returns the measurements of every generation."""
    out = []
    for _ in range(limit):
        jobs = strategy.ask()
        if not jobs:
            return out
        done = []
        for measurement in device.measure(jobs, strategy.race):
            strategy.tell([measurement])
            done.append(measurement)
        out.append(done)
    raise AssertionError(f"the strategy still asks after {limit} generations")


def jobs_of(generations: list[list[Measurement]]) -> list[Job]:
    """All jobs in the order they were asked."""
    return [m.job for generation in generations for m in generation]
