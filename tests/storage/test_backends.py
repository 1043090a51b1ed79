"""What every kind of database must do: one suite over SQLite, journal and PostgreSQL."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from sqlalchemy import select, update

from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Measurement
from moeopt.errors import StorageError
from moeopt.report.dashboard import annotate, serve
from moeopt.storage.facts import Baseline, CellFacts, Run
from moeopt.storage.rdb import RdbBackend
from moeopt.storage.store import StudyKey, StudyStore
from moeopt.storage.tables import HEARTBEATS

from .conftest import CELLS, SERVERS

Make = Callable[[int], list[Measurement]]


def _fill(url: str, key: StudyKey, measurements: list[Measurement], run: str = "run") -> None:
    with StudyStore(url) as store:
        store.load(key, CELLS)
        writer = store.writer(key)
        for number, measurement in enumerate(measurements):
            writer.put(measurement.job.cell, measurement, run, number)


def test_measurements_come_back_bit_for_bit(url: str, key: StudyKey, measurements: Make) -> None:
    given = measurements(60)
    _fill(url, key, given)
    with StudyStore(url, create=False) as store:
        found = store.load(key, CELLS)
    back = sorted((trial.seq, trial.run, trial.measurement) for trials in found.values() for trial in trials)
    assert [measurement for _, _, measurement in back] == given
    assert {run for _, run, _ in back} == {"run"}
    for cell, trials in found.items():
        assert [t.measurement.job.cell for t in trials] == [cell] * len(trials)
        assert [t.seq for t in trials] == sorted(t.seq for t in trials)
    ended = [t.ended for trials in found.values() for t in trials]
    assert all(when is not None and abs(datetime.now() - when) < timedelta(minutes=5) for when in ended)


def test_optuna_reads_what_was_written(url: str, key: StudyKey, measurements: Make) -> None:
    given = [m for m in measurements(60) if m.job.cell == CELLS[2]]
    _fill(url, key, given)
    with StudyStore(url) as store:
        study = store.optuna_study(key, CELLS[2])
        trials = study.trials
        assert [trial.number for trial in trials] == list(range(len(given)))
        for trial, measurement in zip(trials, given, strict=True):
            assert trial.params["BLOCK_SIZE_M"] == measurement.job.config.block_size_m
            assert trial.params["num_stages"] == measurement.job.config.num_stages
            assert list(trial.intermediate_values.values()) == list(measurement.us)
            usable = measurement.status in ("ok", "raced_out")
            assert trial.system_attrs["constraints"] == [0.0 if usable else 1.0]
            assert trial.state.name == ("COMPLETE" if measurement.status == "ok" else "PRUNED")
            assert ("reason" in trial.user_attrs) == (measurement.status != "ok")
            if measurement.status == "ok":
                assert trial.value == measurement.median_us
                assert trial.user_attrs["registers"] == next(iter(measurement.resources.values())).registers
        best = min(m.median_us for m in given if m.status == "ok")
        assert study.best_value == best
        assert len(study.best_trial.distributions) == 6
        study.add_trial(study.best_trial)
        assert study.trials[-1].number == len(given), "Optuna and the writer must count alike"


def test_attributes_stay_under_the_limit(url: str, key: StudyKey, measurements: Make) -> None:
    _fill(url, key, measurements(12))
    with StudyStore(url) as store:
        for cell in CELLS:
            for trial in store.optuna_study(key, cell).trials:
                assert all(len(json.dumps(value)) < 2045 for value in trial.user_attrs.values())


def test_facts_are_kept_and_replaced(url: str, key: StudyKey) -> None:
    cell, config = CELLS[0], SearchSpace.grid(key.shape).configs()[0]
    long = Run("a", portfolio=tuple(SearchSpace.grid(key.shape).configs()[:300]), trials=24, seed=1)
    with StudyStore(url) as store:
        assert store.facts(key, cell) == CellFacts()
        store.add_facts(key, {cell: CellFacts(roofline_us={"up": 10.25}, runs={"a": long})})
        default = CellFacts(baselines={("default", "up"): Baseline(config, 1.5)})
        store.add_facts(key, {cell: default, CELLS[1]: CellFacts(roofline_us={"down": 1.0})})
    with StudyStore(url) as store:
        assert store.facts(key, cell) == CellFacts(
            baselines={("default", "up"): Baseline(config, 1.5)}, roofline_us={"up": 10.25}, runs={"a": long}
        )
        store.load(key, CELLS)
        store.writer(key)
        store.add_facts(key, {cell: CellFacts(runs={"a": Run("a", finished=True)})})
        assert store.runs(key) == [Run("a", finished=True)]
    with StudyStore(url) as store:
        assert store.runs(key) == [Run("a", finished=True)]
        store.add_facts(key, {cell: CellFacts(runs={"a": long})})
    with StudyStore(url) as store:
        assert store.facts(key, cell).runs == {"a": long}
        assert store.facts(key, cell).roofline_us == {"up": 10.25}
        assert store.facts(key, CELLS[1]) == CellFacts(roofline_us={"down": 1.0})


def test_facts_that_cannot_be_read_are_said_in_one_line(url: str, key: StudyKey) -> None:
    with StudyStore(url) as store:
        store.load(key, CELLS)
        store.optuna_study(key, CELLS[1]).set_user_attr("default_down", {"us": "fast"})
        store.refresh()
        with pytest.raises(StorageError, match=r"what is kept of down M=2 .* cannot be read") as caught:
            store.facts(key, CELLS[0])
    assert "\n" not in str(caught.value)


def test_keys_of_several_gpus(url: str, key: StudyKey, measurements: Make) -> None:
    from dataclasses import replace

    other = replace(key, provenance=replace(key.provenance, driver="580.1"))
    _fill(url, key, measurements(12))
    _fill(url, other, measurements(8))
    with StudyStore(url) as store:
        found = {summary.key: summary for summary in store.keys()}  # noqa: SIM118  (no dict)
        assert set(found) == {key, other}
        assert found[key].trials == 12
        assert found[other].trials == 8
        assert sum((Counter(states) for states in found[key].cells.values()), Counter()) == {"COMPLETE": 4, "PRUNED": 8}
        (notice,) = store.notices(other)
        assert "driver is 580.1, was 570.86" in notice
        assert "12 trials" in notice


def test_stale_running_rows_are_swept_with_a_reason(url: str, key: StudyKey) -> None:
    cell = CELLS[0]
    with StudyStore(url) as store:
        store.load(key, [cell])
        study = store.optuna_study(key, cell)
        trial = study.ask()
        trial.suggest_int("BLOCK_SIZE_M", 8, 512, log=True)
        if store.shared:  # on a server it may be another machine's, for an hour
            store.load(key, [cell])
            assert study.trials[0].state == optuna.trial.TrialState.RUNNING
            store.backend.sweep([study._study_id], -1.0, "left RUNNING by a process that ended")
    with StudyStore(url) as store:
        store.lock(key)
        assert store.load(key, [cell]) == {cell: []}
        swept = store.optuna_study(key, cell).trials
        assert [t.state.name for t in swept] == ["FAIL"]
        assert swept[0].user_attrs["reason"] == "left RUNNING by a process that ended"


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


def test_a_running_row_that_ends_in_between_is_not_swept(
    url: str, key: StudyKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process tells its trial between the look and the sweep."""
    cell = CELLS[0]
    with StudyStore(url) as store:
        store.load(key, [cell])
        study = store.optuna_study(key, cell)
        late, left = study.ask(), study.ask()
        running = store.backend.storage.get_all_trials(study._study_id)
        study.tell(late, 1.5)
        monkeypatch.setattr(store.backend.storage, "get_all_trials", lambda *_, **__: running)
        assert store.backend.sweep([study._study_id], -1.0, "left RUNNING") == 1
    with StudyStore(url) as store:
        states = {t.number: t.state.name for t in store.optuna_study(key, cell).trials}
    assert states == {late.number: "COMPLETE", left.number: "FAIL"}


def test_a_repeated_batch_is_stored_once(url: str, key: StudyKey, measurements: Make) -> None:
    """The commit may have happened although the connection was lost before it was confirmed."""
    given = measurements(24)
    with StudyStore(url) as store:
        store.load(key, CELLS)
        writer = store.writer(key)
        rows = [writer._row(m.job.cell, m, "run", i, datetime.now(), datetime.now()) for i, m in enumerate(given)]
        store.backend.add_trials(rows)
        store.backend.add_trials(rows, retry=True)
        assert sum(len(trials) for trials in store.load(key, CELLS).values()) == len(given)


def test_optuna_visualisation_and_importance(tmp_path: Path, key: StudyKey, measurements: Make) -> None:
    _fill(str(tmp_path / "a.db"), key, measurements(120))
    with StudyStore(tmp_path / "a.db") as store:
        study = store.optuna_study(key, CELLS[0])
        assert len(optuna.visualization.plot_optimization_history(study).data) > 0
        assert len(optuna.visualization.plot_slice(study).data) > 0
        importance = optuna.importance.get_param_importances(study)
        assert {"BLOCK_SIZE_M", "num_warps"} <= set(importance)


def test_unknown_study_is_named(url: str, key: StudyKey) -> None:
    with StudyStore(url) as store, pytest.raises(StorageError, match="M=00777"):
        store.optuna_study(key, Cell("up", 777))


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
