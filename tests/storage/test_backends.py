"""Every kind of database: the suite that ships, and what it leaves to us."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path

import optuna
import pytest
from sqlalchemy import select, update

from moeopt.core.trial import Measurement
from moeopt.errors import StorageError
from moeopt.report.dashboard import annotate, serve
from moeopt.storage.backend import Backend
from moeopt.storage.rdb import RdbBackend
from moeopt.storage.store import StudyKey, StudyStore
from moeopt.storage.tables import HEARTBEATS
from moeopt.testing.suites import StorageTestCase
from moeopt.testing.suites.storage import CELLS, Open, fill

from .conftest import SERVERS

Make = Callable[[int], list[Measurement]]


class TestStore(StorageTestCase):
    """The suite, over every kind of database."""

    @pytest.fixture
    def open_store(self, url: str) -> Open:
        return lambda: StudyStore(url)


class InMemory(Backend):
    """What an added backend is at least: any storage of Optuna's."""

    def __init__(self) -> None:
        super().__init__(optuna.storages.InMemoryStorage())

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()


class TestOwnBackend(StorageTestCase):
    """The suite, over a backend that is not moeopt's."""

    @pytest.fixture
    def open_store(self) -> Open:
        backend = InMemory()
        return lambda: StudyStore(backend)


def _fill(url: str, key: StudyKey, measurements: list[Measurement]) -> None:
    fill(StudyStore(url), measurements, key)


def test_attributes_stay_under_the_limit(url: str, key: StudyKey, measurements: Make) -> None:
    _fill(url, key, measurements(12))
    with StudyStore(url) as store:
        for cell in CELLS:
            for trial in store.optuna_study(key, cell).trials:
                assert all(len(json.dumps(value)) < 2045 for value in trial.user_attrs.values())


def test_facts_that_cannot_be_read_are_said_in_one_line(url: str, key: StudyKey) -> None:
    with StudyStore(url) as store:
        store.load(key, CELLS)
        store.optuna_study(key, CELLS[1]).set_user_attr("default_down", {"us": "fast"})
        store.refresh()
        with pytest.raises(StorageError, match=r"what is kept of down M=2 .* cannot be read") as caught:
            store.facts(key, CELLS[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite", *SERVERS], indirect=True)  # Optuna's journal has no heartbeats
def test_a_living_heartbeat_is_left_and_a_silent_one_swept(url: str, key: StudyKey) -> None:
    """Both a process of plain Optuna's that tries configs in a study of ours."""
    cell = CELLS[0]
    with StudyStore(url) as store:
        store.lock(key)
        store.load(key, [cell])
        backend = store.backend
        assert isinstance(backend, RdbBackend)
        silent, living = (store.optuna_study(key, cell).ask()._trial_id for _ in range(2))
        for trial_id in (silent, living):
            backend.storage.heartbeat_interval = 10
            backend.storage.record_heartbeat(trial_id)
        with backend.begin() as connection:
            beat = connection.execute(
                select(HEARTBEATS.c.heartbeat).where(HEARTBEATS.c.trial_id == silent)
            ).scalar_one()
            connection.execute(
                update(HEARTBEATS).where(HEARTBEATS.c.trial_id == silent).values(heartbeat=beat - timedelta(seconds=70))
            )
        store.load(key, [cell])
        states = {t._trial_id: t.state.name for t in store.optuna_study(key, cell).trials}
    assert states == {silent: "FAIL", living: "RUNNING"}


def test_optuna_visualisation_and_importance(tmp_path: Path, key: StudyKey, measurements: Make) -> None:
    _fill(str(tmp_path / "a.db"), key, measurements(120))
    with StudyStore(tmp_path / "a.db") as store:
        study = store.optuna_study(key, CELLS[0])
        assert len(optuna.visualization.plot_optimization_history(study).data) > 0
        assert len(optuna.visualization.plot_slice(study).data) > 0
        importance = optuna.importance.get_param_importances(study)
        assert {"BLOCK_SIZE_M", "num_warps"} <= set(importance)


def test_the_dashboard_is_served_over_it(url: str, key: StudyKey, measurements: Make) -> None:
    _fill(url, key, measurements(24))
    with StudyStore(url) as store:
        assert annotate(store) == len(CELLS)
        assert annotate(store) == 0, "nothing has changed"
        with serve(store, 0) as address:
            base = address.removesuffix("/dashboard")
            with urllib.request.urlopen(f"{base}/api/studies") as answer:
                found = {study["study_name"]: study["study_id"] for study in json.load(answer)["study_summaries"]}
            assert set(found) == {key.study_name(cell) for cell in CELLS}
            study_id = found[key.study_name(CELLS[3])]
            with urllib.request.urlopen(f"{base}/api/studies/{study_id}?after=0") as answer:
                detail = json.load(answer)
        assert len(detail["trials"]) == 6
        assert "Down projection, 64 tokens" in detail["note"]["body"]
        assert any(max(trial["constraints"]) > 0 for trial in detail["trials"]), "what cannot be used is a constraint"
