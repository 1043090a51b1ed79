"""A tune that is cut off by its timeout still writes a file worth having.

Two minutes on a machine with two compile processes and no compile cache, played by a recorded device on a
clock of its own: every new config costs half of 1.1 s (the median on an H200's machine, both projections),
every measurement 20 ms.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.result import TuneResult
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner

RECORDING = (
    Path(__file__).parents[2] / "studies" / "recordings" / "h200-E256-top8-K7168-N256-fp8_w8a8-b128x128.jsonl.gz"
)


class SlowDevice(RecordedDevice):
    """Replays, and lets its clock go on by what a small machine would need."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self.now = 0.0
        self.compiled: set[LaunchConfig] = set()

    def monotonic(self) -> float:
        return self.now

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            config = measurement.job.config
            if config not in self.compiled:
                self.compiled.add(config)
                self.now += 1.1 / 2
            self.now += 0.02
            yield measurement


@pytest.fixture
def device() -> SlowDevice:
    return SlowDevice(Recording.load(RECORDING))


def test_two_minutes_give_a_useful_file(device: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(**{**vars(time), "monotonic": device.monotonic})
    monkeypatch.setattr("moeopt.tuning.tuner.time", clock)
    sizes = device.spec.batch_sizes
    options = TuneOptions(batch_sizes=sizes, trials=400, timeout=120.0)
    with StudyStore(tmp_path / "a.db") as store:
        result = TuneResult.of(Tuner(device, store, options).run())
    assert "timeout of 120 s" in result.notes[0]
    assert 120.0 <= device.now < 180.0
    up, down = (json.loads(path.read_text()) for path in result.export("sglang", tmp_path / "out"))
    assert set(map(int, up)) == set(map(int, down)) == set(sizes)

    def us(config: LaunchConfig, role: str, m: int) -> float:
        return sorted(device.recording.rows[config].roles[role].us[m])[0]

    for m in sizes:
        tuned = us(LaunchConfig.from_dict(up[str(m)]), "up", m) + us(LaunchConfig.from_dict(down[str(m)]), "down", m)
        default = sum(us(device.spec.default_config(role, m), role, m) for role in ROLES)
        best = {}
        for config, row in device.recording.rows.items():
            if row.status == "ok":
                for role in ROLES:
                    key = (config.block_size_m, role)
                    best[key] = min(best.get(key, float("inf")), us(config, role, m))
        optimum = min(best[b, "up"] + best[b, "down"] for b, role in best if role == "up")
        assert tuned < default
        assert tuned < 1.05 * optimum
