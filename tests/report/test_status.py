"""``moeopt status``."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from moeopt.cli import build_app
from moeopt.core.trial import Cell
from moeopt.errors import StorageError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.report.status import storage_status
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner


@pytest.fixture
def database(tmp_path: Path, tiny_recording: Callable[..., Path]) -> Path:
    path = tmp_path / "studies.db"
    with StudyStore(path) as store:
        device = RecordedDevice(Recording.load(tiny_recording()))
        Tuner(device, store, TuneOptions(batch_sizes=(1, 16, 64), trials=12, seed=3)).run()
    return path


def test_counts_reasons_and_best(database: Path) -> None:
    with StudyStore(database) as store:
        (one,) = storage_status(store)
        measured = store.load(one.key, list(one.timed))
    trials = [t.measurement for found in measured.values() for t in found]
    assert sum(one.states.values()) == len(trials)
    assert one.states["COMPLETE"] == sum(m.status == "ok" for m in trials)
    assert one.reasons.get("raced out", 0) == sum(m.status == "raced_out" for m in trials)
    assert one.reasons.get("compile", 0) == sum(m.failure is not None for m in trials)
    assert set(one.rows) == {1, 16, 64}
    for m, row in one.rows.items():
        fastest = min(t.median_us for t in trials if t.job.cell == Cell("up", m) and t.status == "ok")
        assert row.up.us >= fastest
    (run,) = one.runs
    assert (run.space, run.seed, run.trials, run.finished) == ("grid", 3, 12, True)
    assert one.seconds_left is None


def test_time_left_of_a_run_that_goes_on(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moeopt.report import status

    with StudyStore(database) as store:
        (one,) = storage_status(store)
        trials = store.load(one.key, list(one.timed))
    ended = sorted(t.ended for found in trials.values() for t in found if t.ended is not None)
    going_on = [msgspec.structs.replace(one.runs[0], finished=False, trials=20)]
    left = status._seconds_left(trials, going_on, ended)
    assert left is not None
    assert left > 0
    assert status._seconds_left(trials, one.runs, ended) is None
    long_ago = [when - timedelta(hours=1) for when in ended]
    assert status._seconds_left(trials, going_on, long_ago) is None
    assert all(abs(datetime.now() - when) < timedelta(minutes=5) for when in ended)


def test_the_command(database: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(build_app(), ["status", "--storage", str(database)])
    assert shown.exit_code == 0, shown.output
    for expected in ("E8-top2-K256-N128-bf16 | NVIDIA H200 (recorded) | builtin", "raced out", "finished", "up config"):
        assert expected in shown.output
    data = json.loads(runner.invoke(build_app(), ["status", "--storage", str(database), "--json"]).output)
    (study,) = data["studies"]
    assert study["key"]["kernel_hash"] == "0123456789abcdef"
    assert set(study["best"]) == {"1", "16", "64"}
    assert study["best"]["16"]["up"]["config"]["BLOCK_SIZE_M"] in (16, 32, 64)
    assert data["storage"] == str(database)


def test_an_empty_and_a_missing_database(tmp_path: Path) -> None:
    with StudyStore(tmp_path / "empty.db") as store:
        assert store.keys() == []
    runner = CliRunner()
    assert "no studies yet" in runner.invoke(build_app(), ["status", "--storage", str(tmp_path / "empty.db")]).output
    missing = runner.invoke(build_app(), ["status", "--storage", str(tmp_path / "none.db")])
    assert isinstance(missing.exception, StorageError)
