"""Faults on purpose: crashes, hangs, wrong results, sticky errors and lack of memory on chosen configs.

:class:`FaultyDevice` answers as a GPU device answers after such a fault. :class:`FaultyBench` commits
them for real, in a worker process without a GPU, so that the supervisor that guards a GPU can be
tried anywhere.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Failure, Job, Measurement, Race, Reason, never_stop
from moeopt.measure.base import Device, WrappedDevice
from moeopt.measure.bench import Bench, BenchCounts, BenchError, BenchFacts, Checked
from moeopt.recordings.format import Recording

Fault = Literal["compile", "crash", "hang", "wrong_result", "nan", "sticky_error", "memory"]
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)

# What a device reports for each.
REASONS: Final[Mapping[Fault, Reason]] = {
    "compile": "compile",
    "crash": "runtime",
    "hang": "timeout",
    "wrong_result": "correctness",
    "nan": "correctness",
    "sticky_error": "runtime",
    "memory": "runtime",
}
_STUCK: Final = "CUDA error: an illegal memory access was encountered"


def choose_faults(
    configs: Sequence[LaunchConfig], *, share: float = 0.1, kinds: Sequence[Fault] = FAULTS, seed: int = 0
) -> dict[LaunchConfig, Fault]:
    """Makes a share of the configs faulty in each of the ways, none in two.

    Args:
        configs: All of them.
        share: Of each kind.
        kinds: The ways.
        seed: The same seed chooses the same configs.
    """
    shuffled = list(configs)
    random.Random(seed).shuffle(shuffled)
    count = round(share * len(configs))
    return {
        config: kind for number, kind in enumerate(kinds) for config in shuffled[number * count : (number + 1) * count]
    }


class FaultyDevice(WrappedDevice):
    """Any device, with faults on chosen configs.

    Args:
        device: Times the sound ones.
        faults: Which configs are faulty, and how.
    """

    def __init__(self, device: Device, faults: Mapping[LaunchConfig, Fault]) -> None:
        super().__init__(device)
        self.faults = dict(faults)

    def prefetch(self, configs: Iterable[LaunchConfig]) -> None:
        self.device.prefetch(config for config in configs if config not in self.faults)

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        sound = [job for job in jobs if job.config not in self.faults]
        for job in jobs:
            fault = self.faults.get(job.config)
            if fault is not None:
                yield Measurement(job, "failed", failure=Failure(REASONS[fault], f"injected fault: {fault}"))
        yield from self.device.measure(sound, race)


@dataclass
class FaultyBench(Bench):
    """Replays a recording in a worker process, and commits faults there.

    Attributes:
        recording: Path of the recording.
        faults: Which configs are faulty, and how. Without an entry a config is sound.
        open_s: Seconds that opening takes.
        round_s: Seconds that each round takes.
        refusal: What it says instead of opening, or "".
    """

    recording: Path
    faults: Mapping[LaunchConfig, Fault] = field(default_factory=dict)
    open_s: float = 0.0
    round_s: float = 0.0
    refusal: str = ""
    counts: BenchCounts = field(default_factory=BenchCounts)
    prepared: list[Cell] = field(default_factory=list)

    def open(self) -> BenchFacts:
        time.sleep(self.open_s)
        if self.refusal:
            raise BenchError("runtime", self.refusal)
        self._rows = Recording.load(self.recording).rows
        self._stuck = False
        self._us: list[float] = []
        return BenchFacts()

    def prepare(self, cell: Cell) -> None:
        self._touch()
        if cell not in self.prepared:
            self.prepared.append(cell)

    def check(self, job: Job) -> Checked:
        self._touch()
        fault = self.faults.get(job.config)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "hang":
            while True:
                time.sleep(60)
        elif fault == "sticky_error":
            self._stuck = True
            self._touch()
        elif fault == "memory":
            raise BenchError("runtime", "out of GPU memory: tried to allocate 20.00 GiB")
        per_role = [self._rows[job.config].roles[role] for role in job.cell.roles]
        per_round = zip(*(role.us[job.cell.batch_size] for role in per_role), strict=False)
        self._us = [sum(values) for values in per_round][::-1]
        error = max(role.relative_error or 0.0 for role in per_role)
        return Checked({"wrong_result": 0.5, "nan": float("nan")}.get(fault or "", error), self._us[-1] * 1e-6)

    def round(self) -> float:
        self._touch()
        time.sleep(self.round_s)
        us = self._us.pop() if len(self._us) > 1 else self._us[0]
        self.counts.gpu_s += us * 1e-6
        return us

    def alive(self) -> None:
        self._touch()

    def _touch(self) -> None:
        if self._stuck:
            raise RuntimeError(_STUCK)
