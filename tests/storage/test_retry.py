"""The retry policy, and what the writer makes of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt.core.trial import Measurement
from moeopt.errors import StorageError
from moeopt.storage.retry import ConflictError, TransientError, retrying
from moeopt.storage.store import StudyKey, StudyStore
from moeopt.testing.suites.storage import CELLS


class Failing:
    """Fails a number of times."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_what_passes_is_tried_again_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    action = Failing(TransientError("away"), TransientError("away"), ConflictError("same row"))
    with caplog.at_level(logging.WARNING):
        assert retrying(60.0)(action) == "done"
    assert action.calls == 4
    assert [record.getMessage() for record in caplog.records] == ["away; trying again"]


def test_a_conflict_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert retrying(60.0, ConflictError)(Failing(ConflictError("same row"))) == "done"
    assert caplog.records == []


def test_other_errors_are_not_tried_again() -> None:
    for error, policy in (
        (StorageError("no"), retrying(60.0)),
        (TransientError("away"), retrying(60.0, ConflictError)),
    ):
        action = Failing(error)
        with pytest.raises(StorageError) as caught:
            policy(action)
        assert caught.value is error
        assert action.calls == 1


def test_it_gives_up_with_the_error() -> None:
    action = Failing(*[TransientError("away")] * 9)
    with pytest.raises(TransientError, match="away"):
        retrying(0.15)(action)
    assert 1 < action.calls < 9


def test_what_is_put_while_the_database_is_away_is_stored_too(
    tmp_path: Path, key: StudyKey, measurements: Callable[[int], list[Measurement]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was stored although its call failed, and what came after it."""
    given = measurements(24)
    with StudyStore(tmp_path / "a.db") as store:
        store.load(key, CELLS)
        backend = store.backend
        stored, failed = backend.add_trials, []

        def lost_answer(rows: object, *, retry: bool = False) -> None:
            stored(rows, retry=retry)  # type: ignore[arg-type]
            if not failed:
                failed.append(len(list(rows)))  # type: ignore[call-overload]
                raise TransientError("the connection was lost before the answer")

        monkeypatch.setattr(backend, "add_trials", lost_answer)
        writer = store.writer(key)
        for number, measurement in enumerate(given):
            writer.put(measurement.job.cell, measurement, "run", number)
            while number == 11 and not failed:
                time.sleep(0.01)
        writer.close()
        assert failed == [12]
        assert writer.stored == len(given)
        found = [trial.seq for trials in store.load(key, CELLS).values() for trial in trials]
        assert sorted(found) == list(range(len(given)))
