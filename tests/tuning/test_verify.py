"""Which config is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigPair, ConfigTable
from moeopt.core.trial import Cell, Failure, Job, Measurement, Race, never_stop
from moeopt.errors import InvalidInputError
from moeopt.measure.base import Device, DeviceSpec
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.tuning.verify import default_table, verify

A, B, C = (LaunchConfig(16, n, 64, 1, 4, 2) for n in (32, 64, 128))
A_ROW, B_ROW, C_ROW = (ConfigPair(c, c) for c in (A, B, C))


class NoisyDevice(Device):
    """Every config has a true time, every timing noise, and all of it drifts."""

    def __init__(self, us: Mapping[LaunchConfig, float], *, noise: float, drift: float = 0.0) -> None:
        info = Provenance("noisy", "builtin", "0", "0", "3.6.0", "2.11.0")
        h200 = GpuSpec.by_name("NVIDIA H200")
        super().__init__(DeviceSpec(MoEShape(8, 2, 256, 128), h200, info, list, lambda role, batch_size: A))
        self.us, self.noise, self.drift = dict(us), noise, drift
        self.rng = np.random.default_rng(5)
        self.asked: list[Job] = []
        self.broken: set[LaunchConfig] = set()

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement, None, None]:
        for job in jobs:
            self.asked.append(job)
            if job.config in self.broken:
                yield Measurement(job, "failed", failure=Failure("runtime", "the GPU worker was ended by SIGSEGV"))
                continue
            level = self.us[job.config] * (1 + self.drift * len(self.asked))
            us = tuple(level * (1 + self.noise * self.rng.standard_normal()) for _ in range(3))
            extra = {"disturbed": "somebody"} if job.config == C else {}
            yield Measurement(job, "ok", us=us, extra=extra)


def test_a_gain_beyond_noise_and_one_percent_takes_the_row() -> None:
    device = NoisyDevice({A: 100.0, B: 90.0}, noise=0.01)
    outcome = verify(device, {"default": {64: A_ROW}, "tuned": {64: B_ROW}})
    (row,) = outcome.rows
    assert row.kept == row.best == "tuned" and outcome.replaced() == [64]
    assert row.gain == pytest.approx(0.1, abs=0.01)
    assert row.interval[0] < row.gain < row.interval[1] and row.interval[0] > 0.05
    assert outcome.configs() == ConfigTable({64: ConfigPair(B, B)})
    low, high = row.arm("tuned").interval_us
    assert low < row.arm("tuned").total_us < high


@pytest.mark.parametrize(
    ("us", "noise", "words"),
    [
        ({A: 100.0, B: 97.0}, 0.3, "within its noise"),
        ({A: 100.0, B: 99.5}, 0.0001, "too small"),
        ({A: 100.0, B: 105.0}, 0.001, "nothing is faster"),
    ],
)
def test_noise_and_small_gains_keep_the_default_and_say_so(us, noise, words) -> None:
    outcome = verify(NoisyDevice(us, noise=noise), {"default": {64: A_ROW}, "tuned": {64: B_ROW}})
    (row,) = outcome.rows
    assert row.kept == "default" and words in row.reason and "default is kept" in row.reason
    assert outcome.replaced() == [] and outcome.configs()[64].up == A


def test_turns_are_taken_so_that_a_drift_favours_nobody() -> None:
    device = NoisyDevice({A: 100.0, B: 100.0}, noise=0.0001, drift=0.01)
    outcome = verify(device, {"default": {64: A_ROW}, "tuned": {64: B_ROW}}, passes=8)
    assert outcome.rows[0].kept == "default"
    firsts = [job.config for job in device.asked if job.cell.role == "up"][::2]
    assert firsts == [A, B] * 4
    cells = [job.cell for job in device.asked]
    assert cells[:4] == [Cell("up", 64)] * 2 + [Cell("down", 64)] * 2
    assert len(device.asked) == 8 * 4


def test_three_tables_each_has_to_beat_what_holds_the_row() -> None:
    tables = {"existing": {8: A_ROW, 64: A_ROW}, "default": {8: B_ROW, 64: B_ROW}, "tuned": {64: C_ROW}}
    outcome = verify(NoisyDevice({A: 100.0, B: 90.0, C: 89.9}, noise=0.002), tables)
    assert [row.kept for row in outcome.rows] == ["default", "default"]
    assert [arm.name for arm in outcome.rows[0].arms] == ["existing", "default"]
    assert outcome.disturbed == 2 * outcome.passes
    outcome = verify(NoisyDevice({A: 100.0, B: 120.0, C: 80.0}, noise=0.002), tables)
    assert [row.kept for row in outcome.rows] == ["existing", "tuned"]


def test_a_config_that_fails_is_not_kept_and_one_that_runs_replaces_it() -> None:
    device = NoisyDevice({A: 100.0, B: 50.0}, noise=0.001)
    device.broken = {B}
    outcome = verify(device, {"default": {64: A_ROW}, "tuned": {64: B_ROW}})
    assert outcome.rows[0].kept == "default"
    assert "SIGSEGV" in outcome.rows[0].arm("tuned").failure
    device.broken = {A}
    outcome = verify(device, {"default": {64: A_ROW}, "tuned": {64: B_ROW}})
    assert outcome.rows[0].kept == "tuned" and "default has no time" in outcome.rows[0].reason


def test_a_config_in_two_tables_is_timed_once_a_pass() -> None:
    device = NoisyDevice({A: 100.0}, noise=0.001)
    verify(device, {"default": {64: A_ROW}, "tuned": {64: A_ROW}}, passes=3)
    assert len(device.asked) == 3 * 2


def test_a_recording_is_replayed_once_with_the_noise_of_its_rounds(tiny_recording: Callable[..., Path]) -> None:
    recording = Recording.load(tiny_recording())
    device = RecordedDevice(recording)
    best = min(
        (c for c, row in recording.rows.items() if row.status == "ok"),
        key=lambda c: sum(recording.rows[c].roles[role].us[1][0] for role in ("up", "down")),
    )
    default = LaunchConfig(16, 32, 64, 1, 4, 3)
    assert default_table(device, [1])[1] == ConfigPair(default, default)
    outcome = verify(device, {"default": {1: ConfigPair(default, default)}, "tuned": {1: ConfigPair(best, best)}})
    assert outcome.replayed and outcome.passes == 1 and outcome.rows[0].kept == "tuned"
    recorded = sum(recording.rows[best].roles[role].us[1][2] for role in ("up", "down"))
    assert outcome.rows[0].arm("tuned").total_us == pytest.approx(recorded)
    again = verify(device, {"default": {1: ConfigPair(default, default)}, "tuned": {1: ConfigPair(best, best)}})
    assert again == outcome
    assert json.loads(json.dumps(outcome.to_dict()))["batch_sizes"]["1"]["kept"] == "tuned"


def test_what_cannot_be_compared_is_refused() -> None:
    device = NoisyDevice({A: 1.0}, noise=0.0)
    with pytest.raises(InvalidInputError, match="at least two"):
        verify(device, {"default": {1: A_ROW}})
    with pytest.raises(InvalidInputError, match="no batch sizes"):
        verify(device, {"default": {}, "tuned": {}})
    with pytest.raises(InvalidInputError, match="passes 0"):
        verify(device, {"default": {1: A_ROW}, "tuned": {1: A_ROW}}, passes=0)
