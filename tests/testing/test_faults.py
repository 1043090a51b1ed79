"""Faults on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from moeopt.core.trial import Cell, Job
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.testing.faults import FAULTS, REASONS, FaultyDevice, choose_faults


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
