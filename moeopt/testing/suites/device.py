"""Suite for a device."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moeopt.core.config import CONFIG_KEYS, REQUIRED_KEYS, LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement, Reason
from moeopt.measure.base import Device
from moeopt.storage.key import StudyKey
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner


class DeviceTestCase:
    """What moeopt expects of a :class:`~moeopt.measure.base.Device`: override ``make_device``.

    Attributes:
        repeatable: Share within which the same job takes the same time again; None to compare no times.
    """

    repeatable: float | None = None

    @pytest.fixture
    def make_device(self) -> Callable[[], Device]:
        """Opens a device."""
        raise NotImplementedError("override make_device: it opens the device that the suite is for")

    @pytest.fixture
    def device(self, make_device: Callable[[], Device]) -> Iterator[Device]:
        """An open device."""
        with make_device() as device:
            yield device

    @pytest.fixture
    def batch_sizes(self, device: Device) -> tuple[int, ...]:
        """Some that it can time."""
        return (device.spec.batch_sizes or (1, 16, 64))[:3]

    @pytest.fixture
    def configs(self, device: Device) -> Sequence[LaunchConfig]:
        """Some that it can time."""
        return device.spec.candidates(SearchSpace.grid(device.spec.shape).configs())[:4]

    @pytest.fixture
    def failing(self) -> Mapping[LaunchConfig, Reason]:
        """Some that fail, and what the device says of them."""
        return {LaunchConfig(256, 256, 256, 1, 4, 5): "constraints"}

    @pytest.fixture
    def truth(self) -> Device | None:
        """A device that gives the same answers, perhaps after more rounds; None where there is none."""
        return None

    @pytest.fixture
    def jobs(self, configs: Sequence[LaunchConfig], batch_sizes: Sequence[int]) -> list[Job]:
        """Both roles of each config and batch size, and one joint job."""
        jobs = [Job(Cell(role, m), config) for config in configs for m in batch_sizes for role in ROLES]
        return [*jobs, Job(Cell("joint", batch_sizes[-1]), configs[0])]

    def test_its_spec_is_consistent(self, device: Device, batch_sizes: Sequence[int]) -> None:
        spec = device.spec
        configs = SearchSpace.grid(spec.shape).configs()
        fitting = spec.candidates(configs)
        assert fitting == [config for config in configs if config in set(fitting)], "the order is kept, none is twice"
        assert spec.candidates(fitting) == fitting and spec.candidates([]) == []
        assert spec.batch_sizes is None or list(spec.batch_sizes) == sorted(set(spec.batch_sizes)) != []
        assert set(spec.space_extras) <= set(CONFIG_KEYS) - set(REQUIRED_KEYS)
        assert spec.provenance.kernel and spec.provenance.source and "\n" not in spec.provenance.source
        key = StudyKey.of(device, "split")
        assert StudyKey.from_attrs(json.loads(json.dumps(key.attrs()))) == key
        for m in batch_sizes:
            assert all(isinstance(spec.default_config(role, m), LaunchConfig) for role in ROLES)
            for limit in (spec.roofline_us, spec.launch_bytes):
                up, down, joint = (limit(Cell(role, m)) for role in (*ROLES, "joint"))
                assert (up is None) == (down is None) == (joint is None)
                if up and down and joint:
                    assert up > 0 and down > 0 and joint == pytest.approx(up + down)

    def test_every_job_is_answered_once(self, device: Device, jobs: Sequence[Job], truth: Device | None) -> None:
        found = list(device.measure(jobs))
        assert Counter(m.job for m in found) == Counter(jobs)
        for m in found:
            assert m.status == "ok" and m.failure is None, m
            assert m.us and all(0 < us < float("inf") for us in m.us)
            assert m.relative_error is None or 0 <= m.relative_error <= 1e-2
            assert set(m.resources) <= set(m.job.cell.roles)
            assert json.loads(json.dumps(m.extra)) == m.extra
        if truth is not None:
            compare(found, truth)
        assert list(device.measure([])) == []

    def test_times_repeat_and_joint_ones_are_sums(self, device: Device, jobs: Sequence[Job]) -> None:
        first, second = ({m.job: m.median_us for m in device.measure(jobs)} for _ in range(2))
        assert set(first) == set(second) == set(jobs)
        if self.repeatable is not None:
            assert second == pytest.approx(first, rel=self.repeatable + 1e-9)
            parts = [first[Job(Cell(role, jobs[-1].cell.batch_size), jobs[-1].config)] for role in ROLES]
            assert first[jobs[-1]] == pytest.approx(sum(parts), rel=self.repeatable + 1e-9)

    def test_the_race_is_asked_here_after_each_round_and_honoured(self, device: Device, jobs: Sequence[Job]) -> None:
        asked: dict[Job, list[int]] = {job: [] for job in jobs}
        threads = set()

        limits = {"up": 1, "down": 2, "joint": 99}

        def race(job: Job, rounds: Sequence[float]) -> bool:
            threads.add(threading.get_ident())
            assert all(us > 0 for us in rounds)
            asked[job].append(len(rounds))
            return len(rounds) == limits[job.cell.role]

        found = {m.job: m for m in device.measure(jobs, race)}
        assert threads == {threading.get_ident()}
        assert set(found) == set(jobs)
        for job, m in found.items():
            joint = job.cell.role == "joint"
            assert m.status == ("ok" if joint else "raced_out")
            assert joint or len(m.us) == limits[job.cell.role]
            # A job that is timed once more, because the GPU's clock moved, is asked for once more.
            assert asked[job][-len(m.us) :] == list(range(1, len(m.us) + 1))

    def test_an_error_of_the_race_comes_through(self, device: Device, jobs: Sequence[Job]) -> None:
        def race(job: Job, rounds: Sequence[float]) -> bool:
            raise KeyError("the race")

        with pytest.raises(KeyError, match="the race"):
            list(device.measure(jobs, race))
        assert [m.status for m in device.measure(jobs[:1])] == ["ok"], "it goes on"

    def test_closing_drops_the_rest_and_the_device_goes_on(self, device: Device, jobs: Sequence[Job]) -> None:
        results = device.measure(jobs)
        next(results)
        results.close()
        assert next(results, None) is None
        assert Counter(m.job for m in device.measure(jobs[:3])) == Counter(jobs[:3])

    def test_what_fails_is_a_value(
        self, device: Device, jobs: Sequence[Job], failing: Mapping[LaunchConfig, Reason]
    ) -> None:
        broken = [Job(jobs[0].cell, config) for config in failing]
        found = {m.job: m for m in device.measure([*broken, *jobs[:2]])}
        assert set(found) == {*broken, *jobs[:2]}
        for job in broken:
            failure = found[job].failure
            assert found[job].status == "failed" and found[job].us == () and failure is not None
            assert failure.reason == failing[job.config], failure
            assert failure.message and "\n" not in failure.message
        assert all(found[job].status == "ok" for job in jobs[:2])

    def test_prefetching_changes_no_answer(
        self, device: Device, jobs: Sequence[Job], failing: Mapping[LaunchConfig, Reason]
    ) -> None:
        device.prefetch([*failing, *(job.config for job in jobs)])
        assert [m.status for m in device.measure(jobs[:1])] == ["ok"]
        assert all(line and "\n" not in line for line in device.notices())
        control = device.control_us()
        assert control is None or control >= 0

    def test_it_may_be_closed_twice(self, make_device: Callable[[], Device]) -> None:
        device = make_device()
        device.close()
        device.close()

    def test_a_tune_ends_and_a_second_one_times_nothing(
        self, device: Device, batch_sizes: Sequence[int], tmp_path: Path
    ) -> None:
        options = TuneOptions(batch_sizes=tuple(batch_sizes[:2]), trials=3)
        results = []
        for _ in range(2):
            with StudyStore(tmp_path / "suite.db") as store:
                results.append(Tuner(device, store, options).run())
        assert set(results[0].rows) == set(options.batch_sizes)
        assert results[1].rows == results[0].rows
        assert results[1].counts.measured == 0 and results[0].counts.measured > 0


def compare(found: Sequence[Measurement], truth: Device) -> None:
    """Asserts that measurements are those of another device, which may have taken more rounds."""
    expected = {m.job: m for m in truth.measure([m.job for m in found])}
    for m in found:
        other = expected[m.job]
        resources = {role: replace(r, compile_s=0.0) for role, r in m.resources.items()}
        assert resources == {role: replace(r, compile_s=0.0) for role, r in other.resources.items()}
        assert m.us == pytest.approx(other.us[: len(m.us)])
        assert (m.status, m.relative_error, m.failure) == (other.status, other.relative_error, other.failure)
