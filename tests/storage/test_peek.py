"""A look into a database file: what it holds, and that the file stays as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.storage.facts import CellFacts, Run
from moeopt.storage.peek import peek
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner


@pytest.fixture
def database(tmp_path: Path, tiny_recording: Callable[..., Path]) -> Path:
    path = tmp_path / "studies.db"
    with StudyStore(path) as store:
        for mode in ("split", "joint"):
            device = RecordedDevice(Recording.load(tiny_recording()))
            Tuner(device, store, TuneOptions(batch_sizes=(1, 16), trials=4, mode=mode)).run()  # type: ignore[arg-type]
    return path


def test_it_counts_what_the_store_counts(database: Path) -> None:
    with StudyStore(database) as store:
        summaries = store.keys()
        seen = peek(database)
        assert seen is not None
        assert set(seen.titles) == {summary.key.title() for summary in summaries}
        assert seen.trials == sum(summary.trials for summary in summaries)
        assert seen.open_runs == 0
        key, cell = summaries[0].key, next(iter(summaries[0].cells))
        store.add_facts(key, {cell: CellFacts(runs={"abc": Run("abc", trials=9)})})
    later = peek(database)
    assert later is not None and later.open_runs == 1


def test_the_file_stays_as_it_was(database: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    optuna.create_study(storage=f"sqlite:///{other}", study_name="mine").ask()
    (tmp_path / "text.db").write_text("no database")
    (tmp_path / "empty.db").touch()
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.glob("*.db")}
    assert [path.name for path in before if peek(path) is not None] == ["studies.db"]
    assert {path: hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.glob("*.db")} == before
    assert peek(tmp_path / "none.db") is None
    assert not (tmp_path / "none.db").exists()
