"""The loop: results, resume, budget, counts, both modes, any sampler."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import optuna
import pytest

import moeopt
from moeopt.core.shape import ROLES
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.errors import InvalidInputError, RecordingError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions, parse_timeout
from moeopt.tuning.tuner import Tuner

Write = Callable[..., Path]


class CountingDevice(RecordedDevice):
    """Replays, and writes down what it was asked for; may interrupt."""

    def __init__(self, recording: Recording, interrupt_after: int | None = None) -> None:
        super().__init__(recording)
        self.jobs: list[Job] = []
        self.interrupt_after = interrupt_after

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            if self.interrupt_after is not None and len(self.jobs) >= self.interrupt_after:
                raise KeyboardInterrupt
            self.jobs.append(measurement.job)
            yield measurement


def run(device: RecordedDevice, database: Path, **options: object) -> tuple[Tuner, moeopt.TuneResult]:
    with StudyStore(database) as store:
        tuner = Tuner(device, store, TuneOptions(batch_sizes=(1, 16, 64), **{"trials": 8, **options}))  # type: ignore[arg-type]
        return tuner, tuner.run()


@pytest.fixture
def recording(tiny_recording: Write) -> Recording:
    return Recording.load(tiny_recording())


def best_split(recording: Recording, m: int) -> float:
    sums = {}
    for role in ROLES:
        for row in recording.rows.values():
            if row.status == "ok":
                us = sorted(row.roles[role].us[m])[2]
                key = (role, row.config.block_size_m)
                sums[key] = min(us, sums.get(key, float("inf")))
    blocks = {block for _, block in sums}
    return min(sums["up", block] + sums["down", block] for block in blocks)


def test_a_whole_tune_finds_nearly_the_best_split(recording: Recording, tmp_path: Path) -> None:
    _, result = run(RecordedDevice(recording), tmp_path / "a.db", trials=40)
    for m in (1, 16, 64):
        row = result.best(m)
        assert row.up.config.block_size_m == row.down.config.block_size_m
        assert best_split(recording, m) <= row.total_us <= 1.05 * best_split(recording, m)


def test_no_more_than_the_trials_are_timed_per_cell(recording: Recording, tmp_path: Path) -> None:
    device = CountingDevice(recording)
    _, result = run(device, tmp_path / "a.db", trials=5)
    for m in (1, 16, 64):
        for part in (result.best(m).up, result.best(m).down):
            assert 1 <= part.measured <= 5
    trials = [job for job in device.jobs if job.config != device.spec.default_config("up", 1)]
    assert len(set(trials)) == len(trials), "a config was timed twice"


def test_a_second_run_times_nothing(recording: Recording, tmp_path: Path) -> None:
    _, first = run(RecordedDevice(recording), tmp_path / "a.db")
    device = CountingDevice(recording)
    _, second = run(device, tmp_path / "a.db")
    assert device.jobs == []
    assert second.counts.measured == 0
    assert second.counts.resumed == first.counts.measured + first.counts.failed
    assert second.rows == first.rows


def test_more_trials_go_on_from_there(recording: Recording, tmp_path: Path) -> None:
    _, first = run(RecordedDevice(recording), tmp_path / "a.db", trials=6)
    device = CountingDevice(recording)
    _, second = run(device, tmp_path / "a.db", trials=12)
    assert second.counts.measured > 0
    for m in (1, 16, 64):
        assert second.best(m).up.measured <= 12
        assert second.best(m).total_us <= first.best(m).total_us


def test_an_interrupted_run_ends_like_one_that_was_not(recording: Recording, tmp_path: Path) -> None:
    """Before anything was timed, in a generation, late; a process killed at 20 points: tests/storage/test_kill.py."""
    _, whole = run(RecordedDevice(recording), tmp_path / "whole.db", seed=3)
    for cut in (0, 13, 31):
        database = tmp_path / f"{cut}.db"
        tuner, part = run(CountingDevice(recording, interrupt_after=cut), database, seed=3)
        assert tuner.interrupted
        assert "interrupted" in part.notes[0]
        _, resumed = run(CountingDevice(recording), database, seed=3)
        assert resumed.rows == whole.rows
        measured_before = part.counts.measured + part.counts.failed
        assert resumed.counts.resumed == measured_before
        assert resumed.counts.measured + resumed.counts.failed + measured_before == (
            whole.counts.measured + whole.counts.failed
        )


def test_the_same_seed_gives_the_same_result(recording: Recording, tmp_path: Path) -> None:
    results = [run(RecordedDevice(recording), tmp_path / f"{i}.db", seed=9)[1] for i in range(2)]
    assert results[0].rows == results[1].rows


def test_the_default_is_timed_beside_the_trials_and_once(recording: Recording, tmp_path: Path) -> None:
    _, result = run(RecordedDevice(recording), tmp_path / "a.db")
    row = result.best(1)  # SGLang's default for few tokens is one of the configs recorded here
    default = recording.rows[RecordedDevice(recording).spec.default_config("up", 1)]
    assert row.up.default_us == sorted(default.roles["up"].us[1])[2]
    assert row.default_us is not None
    assert row.speedup == pytest.approx(row.default_us / row.total_us)
    assert row.roofline_fraction is not None and 0 < row.roofline_fraction < 1
    assert result.best(64).default_us is None, "64x64x32 is not in the recording"


def test_joint_mode_gives_both_projections_one_config(recording: Recording, tmp_path: Path) -> None:
    _, result = run(RecordedDevice(recording), tmp_path / "a.db", mode="joint", trials=20)
    for m in (1, 16, 64):
        row = result.best(m)
        assert row.up.config == row.down.config == row.joint_config
        recorded = recording.rows[row.up.config].roles
        assert row.total_us == pytest.approx(sum(sorted(recorded[role].us[m])[2] for role in ROLES), rel=2e-3)
        assert row.up.us == pytest.approx(sorted(recorded["up"].us[m])[2], rel=5e-3)


def test_counts_add_up(recording: Recording, tmp_path: Path) -> None:
    tuner, result = run(RecordedDevice(recording), tmp_path / "a.db", trials=30)
    counts = result.counts
    assert counts.space == 1920
    assert counts.infeasible == 1920 - len(tuner.candidates)
    assert counts.failed == sum(counts.reasons.values())
    assert set(counts.reasons) <= {"compile"}
    assert counts.raced_out <= counts.measured
    with StudyStore(tmp_path / "a.db") as store:
        trials = store.load(tuner.key, tuner.cells)
    assert sum(map(len, trials.values())) == counts.measured + counts.failed


@pytest.mark.parametrize(
    "sampler",
    [
        optuna.samplers.TPESampler(seed=0),
        optuna.samplers.RandomSampler(seed=0),
        optuna.samplers.QMCSampler(seed=0),
    ],
    ids=lambda s: type(s).__name__,
)
def test_any_optuna_sampler_tunes(recording: Recording, tmp_path: Path, sampler: optuna.samplers.BaseSampler) -> None:
    _, result = run(RecordedDevice(recording), tmp_path / "a.db", sampler=sampler, trials=6)
    assert result.batch_sizes == (1, 16, 64)
    assert all(result.best(m).up.measured <= 6 for m in result.batch_sizes)


def test_a_timeout_ends_with_the_best_so_far(recording: Recording, tmp_path: Path) -> None:
    _, result = run(RecordedDevice(recording), tmp_path / "a.db", timeout=1e-9)
    assert "timeout" in result.notes[0]
    assert result.counts.measured + result.counts.failed == 1
    _, resumed = run(RecordedDevice(recording), tmp_path / "a.db")
    assert resumed.counts.resumed == 1
    assert resumed.batch_sizes == (1, 16, 64)


def test_tune_and_load(tiny_recording: Write, tmp_path: Path) -> None:
    path, storage = tiny_recording(), f"sqlite:///{tmp_path / 's.db'}"
    result = moeopt.tune(gpu=f"recorded:{path}", trials=6, storage=storage, progress=False)
    loaded = moeopt.load(storage, result.shape)
    assert {m: (r.up.config, r.down.config, r.total_us) for m, r in loaded.rows.items()} == {
        m: (r.up.config, r.down.config, r.total_us) for m, r in result.rows.items()
    }
    assert loaded.best(1).default_us == result.best(1).default_us
    assert loaded.best(1).roofline_us == result.best(1).roofline_us
    study = result.study("up", 16)
    assert min(t.value for t in study.trials if t.value is not None) > 0
    assert len(study.trials) >= 6
    with pytest.raises(InvalidInputError, match="was not tuned"):
        result.study("up", 17)


def test_a_results_study_closes_its_database(tiny_recording: Write, tmp_path: Path) -> None:
    def opened() -> list[str]:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return [name for name in (str(link.readlink()) for link in links) if str(tmp_path / "s.db") in name]

    result = moeopt.tune(gpu=f"recorded:{tiny_recording()}", trials=2, storage=str(tmp_path / "s.db"), progress=False)
    assert opened() == []
    study = result.study("up", 16)
    assert len(study.trials) == 2
    assert opened()
    del study
    gc.collect()
    assert opened() == []


def test_the_shape_of_a_recording_must_be_the_one_asked_for(tiny_recording: Write, tmp_path: Path) -> None:
    shape = moeopt.MoEShape(num_experts=16, top_k=2, hidden_size=256, intermediate_size=128)
    with pytest.raises(RecordingError, match=r"is a recording of E8-top2.*E16-top2.*was asked for"):
        moeopt.tune(shape, gpu=f"recorded:{tiny_recording()}", storage=str(tmp_path / "s.db"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sizes": [0]}, "0.*: give at least one batch size from 1"),
        ({"batch_sizes": []}, "give at least one"),
        ({"batch_sizes": [5]}, "batch size 5 is not in the recording: it holds 1, 16, 64"),
        ({"trials": 0}, "trials is 0"),
        ({"mode": "both"}, "mode 'both'"),
        ({"space": "huge"}, "search space 'huge'"),
        ({"seed": -1}, "seed is -1"),
        ({"timeout": "soon"}, "timeout is 'soon'"),
        ({"workers": 0}, "workers is 0: give at least 1 compile process"),
        ({"executor": "slurm"}, "executor 'slurm' is unknown: give 'local' or 'ray'"),
        ({"wait_idle": "soon"}, "wait_idle is 'soon'"),
        ({"warm_l2": True}, "was measured with a cold L2"),
    ],
)
def test_bad_arguments(tiny_recording: Write, tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        moeopt.tune(
            gpu=f"recorded:{tiny_recording()}",
            **{"storage": str(tmp_path / "s.db"), "progress": False, **options},  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), (3, 3), (None, None)]
)
def test_parse_timeout(text: str | None, seconds: float | None) -> None:
    assert parse_timeout(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "0", "5 minutes", "1d", 0, -2.0, float("nan")])
def test_parse_timeout_refuses(text: str | float) -> None:
    with pytest.raises(InvalidInputError, match="timeout is"):
        parse_timeout(text)


def test_every_cell_of_a_mode() -> None:
    split = TuneOptions(batch_sizes=(4, 1, 4)).cells()
    assert split == (Cell("up", 1), Cell("down", 1), Cell("up", 4), Cell("down", 4))
    assert TuneOptions(batch_sizes=(2,), mode="joint").cells() == (Cell("joint", 2),)


def test_json_is_the_contract(tiny_recording: Write, tmp_path: Path) -> None:
    result = moeopt.tune(
        gpu=f"recorded:{tiny_recording()}", trials=4, storage=str(tmp_path / "s.db"), seed=4, progress=False
    )
    result.write_json(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert {"shape", "gpu", "kernel", "mode", "space", "seed", "wall_s", "batch_sizes", "counts"} <= set(data)
    assert data["seed"] == 4
    row = data["batch_sizes"]["64"]
    assert set(row) == {"up", "down", "total_us", "default_us", "roofline_us"}
    assert set(row["up"]) == {"config", "us", "measured"}
    assert row["default_us"] is None
    assert row["total_us"] == pytest.approx(row["up"]["us"] + row["down"]["us"])
    assert {
        "space", "infeasible", "compiled", "rejected", "measured", "raced_out", "failed", "unique_compiled", "resumed",
    } <= set(data["counts"])  # fmt: skip
