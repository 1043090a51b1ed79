"""Faults on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job, Reason
from moeopt.measure.multi_gpu import MultiGpuDevice
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.testing.faults import FAULTS, REASONS, Fault, FaultyDevice, choose_faults
from moeopt.testing.suites import DeviceTestCase


class TestFaultyDevice(DeviceTestCase):
    repeatable = 0.0

    @pytest.fixture
    def sound(self, tiny_recording: Callable[..., Path]) -> RecordedDevice:
        return RecordedDevice(Recording.load(tiny_recording()))

    @pytest.fixture
    def faults(self, sound: RecordedDevice) -> dict[LaunchConfig, Fault]:
        return dict(zip(sorted(sound.recording.rows)[-len(FAULTS) :], FAULTS, strict=True))

    @pytest.fixture
    def make_device(self, sound: RecordedDevice, faults: dict[LaunchConfig, Fault]) -> Callable[[], FaultyDevice]:
        return lambda: FaultyDevice(sound, faults)

    @pytest.fixture
    def failing(self, faults: dict[LaunchConfig, Fault]) -> dict[LaunchConfig, Reason]:
        return {config: REASONS[fault] for config, fault in faults.items()}

    @pytest.fixture
    def truth(self, sound: RecordedDevice) -> RecordedDevice:
        return sound

    def test_all_that_is_no_fault_is_the_devices_own(self, sound: RecordedDevice) -> None:
        several = MultiGpuDevice([sound, sound])
        several.control = (100.0, 102.0)
        faulty = FaultyDevice(several, {})
        assert faulty.spec is several.spec
        assert faulty.notices() == several.notices() != ()
        assert faulty.control_us() == several.control_us() == 102.0


def test_faults_are_disjoint_exact_and_seeded() -> None:
    configs = list(range(200))
    faults = choose_faults(configs, share=0.1, seed=7)  # type: ignore[arg-type,type-var]
    assert Counter(faults.values()) == dict.fromkeys(FAULTS, 20)
    assert faults == choose_faults(configs, share=0.1, seed=7)  # type: ignore[arg-type,type-var]
    assert faults != choose_faults(configs, share=0.1, seed=8)  # type: ignore[arg-type,type-var]


def test_a_faulty_device_fails_as_a_gpu_would_and_leaves_the_rest_alone(tiny_recording: Callable[..., Path]) -> None:
    device = RecordedDevice(Recording.load(tiny_recording()))
    configs = device.spec.candidates(list(device.recording.rows))
    faults = choose_faults(configs, share=0.1, seed=1)
    faulty = FaultyDevice(device, faults)
    jobs = [Job(Cell("up", 16), config) for config in configs]
    found = {m.job: m for m in faulty.measure(jobs)}
    assert set(found) == set(jobs)
    sound = {m.job: m for m in device.measure([job for job in jobs if job.config not in faults])}
    assert {job: m for job, m in found.items() if job.config not in faults} == sound
    assert {job.config: m.failure.reason for job, m in found.items() if job.config in faults} == {
        config: REASONS[fault] for config, fault in faults.items()
    }
