"""Benches that do wrong in ways of their own. The worker process imports this: it stays light."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job
from moeopt.measure.bench import Bench, BenchFacts, Checked
from moeopt.testing.faults import FaultyBench


@dataclass
class StillbornBench(FaultyBench):
    def open(self) -> BenchFacts:
        os.abort()


@dataclass
class DiesOverOperandsBench(FaultyBench):
    def prepare(self, cell: Cell) -> None:
        if cell.batch_size == 64:
            os.abort()


@dataclass
class LongLaunchBench(FaultyBench):
    """Rounds that are slow, and said to be."""

    def check(self, job: Job) -> Checked:
        checked = super().check(job)
        return Checked(checked.relative_error, 0.2)


@dataclass
class DriftingBench(FaultyBench):
    """The control config takes another factor of its time each time it is timed."""

    factors: tuple[float, ...] = (1.0,)
    control: LaunchConfig | None = None
    times: int = -1

    def check(self, job: Job) -> Checked:
        self.factor = 1.0
        if job.config == self.control:
            self.times = min(self.times + 1, len(self.factors) - 1)
            self.factor = self.factors[self.times]
        return super().check(job)

    def round(self) -> float:
        return super().round() * self.factor


@dataclass
class HangsLaterBench(FaultyBench):
    """Sound for so many configs; the next launch never ends, and leaves a file that says so."""

    sound: int = 20
    marker: str = ""

    def check(self, job: Job) -> Checked:
        self.sound -= 1
        if self.sound < 0:
            Path(self.marker).touch()
            time.sleep(3600)
        return super().check(job)


def prepared(bench: FaultyBench) -> list[Cell]:
    """The cells whose operands a worker has made."""
    return bench.prepared


def unanswerable(bench: Bench) -> NoReturn:
    raise ValueError("42")
