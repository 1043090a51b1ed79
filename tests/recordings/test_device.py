"""A recording as a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt import LaunchConfig, SearchSpace
from moeopt.core.trial import Cell, Job
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.testing.suites import DeviceTestCase

Write = Callable[..., Path]
FAST = LaunchConfig(16, 64, 128, 1, 4, 3)
CRASHES = LaunchConfig(32, 128, 64, 1, 8, 3)
TOO_LARGE = LaunchConfig(64, 128, 64, 1, 4, 3)


@pytest.fixture
def device(tiny_recording: Write) -> RecordedDevice:
    return RecordedDevice(Recording.load(tiny_recording()))


class TestRecordedDevice(DeviceTestCase):
    repeatable = 0.0

    @pytest.fixture
    def make_device(self, tiny_recording: Write) -> Callable[[], RecordedDevice]:
        return lambda: RecordedDevice(Recording.load(tiny_recording()))

    @pytest.fixture
    def failing(self):
        unknown = LaunchConfig(16, 64, 128, 3, 4, 3)
        return {CRASHES: "compile", TOO_LARGE: "constraints", unknown: "constraints"}


def test_replay_gives_the_recorded_rounds(device: RecordedDevice) -> None:
    jobs = [Job(Cell(role, m), FAST) for role in ("up", "down") for m in (1, 64)]  # type: ignore[arg-type]  # roles
    for job, answer in zip(jobs, device.measure(jobs), strict=True):
        row = device.recording.rows[FAST]
        recorded = row.roles[job.cell.role]  # type: ignore[index]  # not joint here
        assert answer.job == job and answer.status == "ok"
        assert answer.us == recorded.us[job.cell.batch_size] and answer.relative_error == 0.0017
        assert answer.resources == {job.cell.role: row.resources(job.cell.role)}
        assert answer.median_us == sorted(answer.us)[2]


def test_a_joint_cell_is_the_sum_of_both_roles_round_by_round(device: RecordedDevice) -> None:
    up, down, joint = device.measure([Job(Cell(role, 16), FAST) for role in ("up", "down", "joint")])  # type: ignore[arg-type]  # roles
    assert joint.us == tuple(a + b for a, b in zip(up.us, down.us, strict=True))
    assert set(joint.resources) == {"up", "down"}


def test_failures_are_values_with_a_reason(device: RecordedDevice) -> None:
    cell = Cell("up", 16)
    unknown = LaunchConfig(16, 64, 128, 3, 4, 3)
    jobs = [Job(cell, CRASHES), Job(cell, TOO_LARGE), Job(cell, unknown), Job(Cell("joint", 17), FAST)]
    crash, large, other, size = device.measure(jobs)
    assert [m.status for m in (crash, large, other, size)] == ["failed"] * 4
    assert crash.failure and (crash.failure.reason, crash.failure.message) == ("compile", "PassManager::run failed")
    assert large.failure and large.failure.reason == "constraints"
    assert other.failure and "not in the recording" in other.failure.message
    assert size.failure and "batch size 17 is not in the recording" in size.failure.message
    assert crash.median_us == float("inf")


def test_measure_is_lazy(device: RecordedDevice) -> None:
    rounds: list[Job] = []
    jobs = [Job(Cell("up", m), FAST) for m in (1, 16, 64)]
    results = device.measure(jobs, lambda job, _: bool(rounds.append(job)))
    next(results)
    assert {job.cell.batch_size for job in rounds} == {1}
    results.close()


def test_candidates_are_those_that_the_gpu_would_try(device: RecordedDevice) -> None:
    configs = SearchSpace.grid(device.spec.shape).configs()
    candidates = device.spec.candidates(configs)
    assert CRASHES in candidates and TOO_LARGE not in candidates
    assert set(candidates) < set(configs) and all(c in device.recording.rows for c in candidates)
    assert candidates == [c for c in configs if c in set(candidates)]


def test_device_info_says_that_nothing_is_measured_here(device: RecordedDevice) -> None:
    info = device.spec.provenance
    assert info.recorded and "nothing is measured on this machine" in info.source and "NVIDIA H200" in info.source
    assert (info.kernel, info.kernel_version, info.kernel_hash) == ("builtin", "0.1.0", "0123456789abcdef")
    assert (info.triton, info.torch, info.routing) == ("3.6.0", "2.11.0", "uniform")


def test_rooflines_where_the_header_has_them(tiny_recording: Write) -> None:
    device = RecordedDevice(Recording.load(tiny_recording()))
    assert device.spec.roofline_us(Cell("up", 16)) == pytest.approx(0.9 * 14 * 1.5)
    assert device.spec.roofline_us(Cell("joint", 16)) == pytest.approx(0.9 * 14 * 2.5)
    assert device.spec.roofline_us(Cell("up", 17)) is None
    none = RecordedDevice(Recording.load(tiny_recording("none.gz", roofline_us={})))
    assert none.spec.roofline_us(Cell("up", 16)) is None


@pytest.mark.parametrize(("kernel", "text"), [("vllm 0.33.0", "16x64x128 G1 w4 s4"), ("sglang", "64x64x32 G8 w4 s3")])
def test_default_config_is_that_of_the_recordings_engine(tiny_recording: Write, kernel: str, text: str) -> None:
    device = RecordedDevice(Recording.load(tiny_recording(kernel=kernel)))
    assert str(device.spec.default_config("up", 16)) == text


def test_extras_of_the_recorded_space(tiny_recording: Write) -> None:
    device = RecordedDevice(Recording.load(tiny_recording()))
    assert device.spec.space_extras == ()
    wide = {"space": {"BLOCK_SIZE_M": [16], "maxnreg": [0, 96]}}
    assert RecordedDevice(Recording.load(tiny_recording("w.gz", **wide))).spec.space_extras == ("maxnreg",)
