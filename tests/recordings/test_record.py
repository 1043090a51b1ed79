"""Recording a device, which here is a recording: what comes out is what went in."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest

from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.errors import RecordingError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording, read_lines
from moeopt.recordings.record import Recorder

Write = Callable[..., Path]


class Dying(RecordedDevice):
    """A device whose process ends after some measurements."""

    left = 100

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            yield measurement


def space_of(recording: Recording) -> SearchSpace:
    return SearchSpace("grid", {key: tuple(values) for key, values in (recording.header.space or {}).items()})


@pytest.fixture
def source(tiny_recording: Write) -> Recording:
    return Recording.load(tiny_recording())


def test_a_recording_of_a_recording_is_the_same(source: Recording, tmp_path: Path) -> None:
    out = tmp_path / "out" / "copy.jsonl.gz"
    Recorder(RecordedDevice(source), space_of(source), (1, 16, 64), out, slow_factor=100.0).run()
    copy = Recording.load(out)
    assert copy.shape == source.shape
    assert copy.gpu == source.gpu
    assert copy.header.complete is True
    for role in ROLES:
        assert copy.header.roofline_us and source.header.roofline_us
        assert copy.header.roofline_us[role] == pytest.approx(source.header.roofline_us[role], abs=1e-3)
    assert set(copy.rows) == set(source.rows)
    for config, row in source.rows.items():
        assert copy.rows[config].status == row.status
        assert copy.rows[config].roles.keys() == row.roles.keys()
        for role in row.roles:
            assert copy.rows[config].roles[role].us == row.roles[role].us
            assert copy.rows[config].roles[role].relative_error == row.roles[role].relative_error
    assert not out.with_name(out.name + ".part").exists()


def test_slow_configs_are_timed_once(source: Recording, tmp_path: Path) -> None:
    out = tmp_path / "slow.jsonl.gz"
    Recorder(RecordedDevice(source), space_of(source), (1, 16, 64), out, slow_factor=1.05).run()
    lengths = {len(us) for row in Recording.load(out).rows.values() for r in row.roles.values() for us in r.us.values()}
    assert min(lengths) == 1 and max(lengths) == 5


def test_it_goes_on_where_it_was_cut_off(source: Recording, tmp_path: Path) -> None:
    out = tmp_path / "cut.jsonl.gz"
    with pytest.raises(KeyboardInterrupt):
        Recorder(Dying(source), space_of(source), (1, 16, 64), out, slow_factor=100.0).run()
    part = out.with_name(out.name + ".part")
    with part.open("a", encoding="utf-8") as file:
        file.write('{"config": {"BLOCK_SIZE_M": 16, "BLO')  # a torn line
    assert not out.exists()
    seen: list[Job] = []

    class Counting(RecordedDevice):
        def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
            seen.extend(jobs)
            return super().measure(jobs, race)

    Recorder(Counting(source), space_of(source), (1, 16, 64), out, slow_factor=100.0).run()
    again = Recording.load(out)
    assert {c: r.status for c, r in again.rows.items()} == {c: r.status for c, r in source.rows.items()}
    legal = [c for c, row in source.rows.items() if row.status != "out_of_resources"]
    assert len({job.config for job in seen}) < len(legal)


def test_a_part_of_another_recording_is_not_gone_on_with(source: Recording, tmp_path: Path) -> None:
    out = tmp_path / "cut.jsonl.gz"
    with pytest.raises(KeyboardInterrupt):
        Recorder(Dying(source), space_of(source), (1, 16, 64), out).run()
    with pytest.raises(RecordingError, match="begun with another batch_sizes"):
        Recorder(RecordedDevice(source), space_of(source), (1, 16), out).run()


def test_the_default_is_recorded_whatever_the_space(source: Recording, tmp_path: Path) -> None:
    """Else a tune on the recording has nothing to compare with."""
    space = SearchSpace("few", {**space_of(source).values, "num_stages": (2,), "BLOCK_SIZE_N": (64,)})
    device = RecordedDevice(source)
    defaults = {device.spec.default_config(role, m) for role in ROLES for m in (1, 16)}
    extra = set(device.spec.candidates(list(defaults)))
    assert extra and not any(space.contains(config) for config in extra)
    for limit in (None, 2):
        recording = Recording.load(Recorder(device, space, (1, 16), tmp_path / f"{limit}.jsonl.gz", limit=limit).run())
        assert extra < set(recording.rows) and len(recording.rows) == len(extra) + (limit or len(space))
        assert recording.header.complete == (limit is None)
        assert all(set(recording.rows[config].up.us) == {1, 16} for config in extra)


def test_a_sample_is_part_of_a_larger_sample(source: Recording, tmp_path: Path) -> None:
    device, space = RecordedDevice(source), space_of(source)
    small, large = (Recorder(device, space, (1,), tmp_path / f"{n}.jsonl.gz", limit=n) for n in (20, 50))
    assert set(small.configs) < set(large.configs)
    recording = Recording.load(small.run())
    assert len(recording.rows) == 20
    assert recording.header.complete is False


def test_the_header_is_json_of_the_format(source: Recording, tmp_path: Path) -> None:
    path = Recorder(RecordedDevice(source), space_of(source), (1,), tmp_path / "a.jsonl.gz").run()
    header = read_lines(path)[0]
    assert header["format"] == "moe-landscape/1"
    assert {"shape", "gpu", "kernel", "kernel_hash", "versions", "timing", "space", "routing", "roles"} <= set(header)
    json.dumps(header)
