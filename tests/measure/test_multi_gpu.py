"""Several devices as one."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moeopt.core.gpu import GpuSpec
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.errors import DeviceError
from moeopt.measure.multi_gpu import AGREEMENT, MultiGpuDevice
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.testing.suites import DeviceTestCase


class Member(RecordedDevice):
    """A replayed recording with a control config, that remembers what it was given."""

    def __init__(self, recording: Recording, control: float | None = 100.0) -> None:
        super().__init__(recording)
        self.control = control
        self.jobs: list[Job] = []
        self.threads: set[int] = set()
        self.closed = False
        self.fail: Exception | None = None

    def control_us(self) -> float | None:
        return self.control

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement, None, None]:
        self.jobs += jobs
        self.threads.add(threading.get_ident())
        if self.fail:
            raise self.fail
        yield from super().measure(jobs, race)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def recording(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


class TestMultiGpuDevice(DeviceTestCase):
    repeatable = 0.0

    @pytest.fixture
    def make_device(self, recording: Recording) -> Callable[[], MultiGpuDevice]:
        return lambda: MultiGpuDevice([Member(recording), Member(recording, 102.0)])

    @pytest.fixture
    def truth(self, recording: Recording) -> RecordedDevice:
        return RecordedDevice(recording)


def all_jobs(recording: Recording) -> list[Job]:
    configs = [config for config, row in recording.rows.items() if row.status == "ok"][:20]
    return [Job(Cell(role, m), c) for m in (1, 16, 64) for role in ("up", "down") for c in configs]


def test_every_job_is_answered_as_by_one_device_and_batch_sizes_are_not_torn(recording) -> None:
    members = [Member(recording), Member(recording)]
    several = MultiGpuDevice(members)
    jobs = all_jobs(recording)
    found = {m.job: m for m in several.measure(jobs)}
    assert found == {m.job: m for m in RecordedDevice(recording).measure(jobs)}
    owners = defaultdict(set)
    for number, member in enumerate(members):
        for job in member.jobs:
            owners[job.cell.batch_size].add(number)
    assert all(len(numbers) == 1 for numbers in owners.values())
    assert {n for numbers in owners.values() for n in numbers} == {0, 1}
    assert threading.get_ident() not in members[0].threads | members[1].threads


def test_gpus_that_do_not_agree_are_not_mixed(recording) -> None:
    apart = 100.0 * (1 + 1.5 * AGREEMENT)
    members = [Member(recording), Member(recording, apart)]
    with pytest.raises(DeviceError, match=r"disagree by 4\.5 %.*GPU 0 100\.0 µs, GPU 1 104\.5 µs"):
        list(MultiGpuDevice(members).measure(all_jobs(recording)))
    assert not members[0].jobs and not members[1].jobs
    with pytest.raises(DeviceError, match="nothing shows that the GPUs agree"):
        list(MultiGpuDevice([Member(recording), Member(recording, None)]).measure(all_jobs(recording)))
    several = MultiGpuDevice([Member(recording), Member(recording, 102.0)])
    assert several.notices() == ()
    assert several.check_agreement() == (100.0, 102.0)
    assert several.notices() == ("the 2 GPUs agree within 2.00 % on the control config (100.0, 102.0 µs)",)
    assert several.spec.provenance.source.startswith("2 GPUs; ")


def test_gpus_of_two_kinds_are_refused(recording) -> None:
    other = Member(recording)
    other.spec = replace(other.spec, gpu=GpuSpec.by_name("NVIDIA B200"))
    with pytest.raises(DeviceError, match="GPU 1 is NVIDIA B200"):
        MultiGpuDevice([Member(recording), other])
    with pytest.raises(DeviceError, match="no GPU"):
        MultiGpuDevice([])


def test_an_error_of_one_device_is_raised_here(recording) -> None:
    members = [Member(recording), Member(recording)]
    members[1].fail = DeviceError("gone")
    with pytest.raises(DeviceError, match="gone"):
        list(MultiGpuDevice(members).measure(all_jobs(recording)))


def test_closing_the_iterator_ends_the_threads_and_closing_the_device_closes_all(recording) -> None:
    members = [Member(recording), Member(recording)]
    several = MultiGpuDevice(members)
    asked = []

    def race(job: Job, rounds: Sequence[float]) -> bool:
        asked.append(job)
        return False

    results = several.measure(all_jobs(recording), race)
    next(results)
    results.close()
    count = len(asked)
    assert not [t for t in threading.enumerate() if t.name.startswith("moeopt-gpu")]
    assert len(asked) == count < 3 * len(all_jobs(recording))
    several.close()
    assert all(member.closed for member in members)
