"""Suite for a study database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape, Role
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Failure, Job, Measurement, Resources
from moeopt.errors import StorageError
from moeopt.storage.facts import Baseline, BaselineKind, CellFacts, Run
from moeopt.storage.key import StudyKey
from moeopt.storage.store import StudyStore

SHAPE = MoEShape(256, 8, 3072, 256)
KEY = StudyKey(
    SHAPE, "NVIDIA H200", Provenance("", "builtin", "0.1.0", "0123456789abcdef", "3.6.0", "2.11.0", "570.86")
)
CELLS = (Cell("up", 2), Cell("down", 2), Cell("up", 64), Cell("down", 64))
CONFIGS = SearchSpace.grid(SHAPE).configs()


def made_up(count: int) -> list[Measurement]:
    """Measurements of all kinds, over all cells in turn."""
    return [_measurement(number, CONFIGS[(number * 37) % len(CONFIGS)]) for number in range(count)]


def _measurement(number: int, config: LaunchConfig) -> Measurement:
    cell = CELLS[number % len(CELLS)]
    job = Job(cell, config)
    resources = {cell.roles[0]: Resources(128 + number % 64, number % 3, 98304, 0.1 * number)}
    match number % 6:
        case 0:
            return Measurement(
                job, "failed", failure=Failure("compile", 'µ PassManager::run "failed"\\' * 200, "a.log")
            )
        case 1:
            return Measurement(job, "raced_out", (1 / 3 + number,), 1.7e-3, resources)
        case 2:
            return Measurement(job, "rejected", (), None, resources, Failure("constraints", "spills 4,096 bytes"))
        case 3:
            failure = Failure("correctness", "error inf against the reference")
            return Measurement(job, "failed", (), float("inf"), resources, failure, {"clock": 1980})
    us = tuple((number + 1) * 1.1**i / 7 for i in range(5))
    return Measurement(job, "ok", us, 0.00171 + number / 3e6, resources, None, {"clock": 1980, "disturbed": False})


def fill(store: StudyStore, measurements: list[Measurement], key: StudyKey = KEY, run: str = "run") -> None:
    """Stores measurements as a tune does, and closes."""
    with store:
        store.load(key, CELLS)
        writer = store.writer(key)
        for number, measurement in enumerate(measurements):
            writer.put(measurement.job.cell, measurement, run, number)


Open = Callable[[], StudyStore]


class StorageTestCase:
    """What moeopt expects of a :class:`~moeopt.storage.backend.Backend` behind a store: override ``open_store``."""

    @pytest.fixture
    def open_store(self) -> Open | Iterator[Open]:
        """Opens the same database, empty at first, as often as it is called."""
        raise NotImplementedError("override open_store: it opens the database that the suite is for")

    def test_measurements_come_back_bit_for_bit(self, open_store: Open) -> None:
        given = made_up(60)
        fill(open_store(), given)
        with open_store() as store:
            found = store.load(KEY, CELLS)
        back = sorted((trial.seq, trial.run, trial.measurement) for trials in found.values() for trial in trials)
        assert [measurement for _, _, measurement in back] == given
        assert {run for _, run, _ in back} == {"run"}
        for cell, trials in found.items():
            assert [t.measurement.job.cell for t in trials] == [cell] * len(trials)
            assert [t.seq for t in trials] == sorted(t.seq for t in trials)
        ended = [t.ended for trials in found.values() for t in trials]
        assert all(when is not None and abs(datetime.now() - when) < timedelta(minutes=5) for when in ended)

    def test_optuna_reads_what_was_written(self, open_store: Open) -> None:
        given = [m for m in made_up(60) if m.job.cell == CELLS[2]]
        fill(open_store(), given)
        with open_store() as store:
            study = store.optuna_study(KEY, CELLS[2])
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
            assert study.best_value == min(m.median_us for m in given if m.status == "ok")
            assert len(study.best_trial.distributions) == 6
            study.add_trial(study.best_trial)
            assert study.trials[-1].number == len(given), "Optuna and the writer must count alike"

    def test_facts_are_kept_and_replaced(self, open_store: Open) -> None:
        cell = CELLS[0]
        default: Mapping[tuple[BaselineKind, Role], Baseline] = {("default", "up"): Baseline(CONFIGS[0], 1.5)}
        long = Run("a", portfolio=tuple(CONFIGS[:300]), trials=24, seed=1)
        with open_store() as store:
            assert store.facts(KEY, cell) == CellFacts()
            store.add_facts(KEY, {cell: CellFacts(roofline_us={"up": 10.25}, runs={"a": long})})
            down = CellFacts(roofline_us={"down": 1.0})
            store.add_facts(KEY, {cell: CellFacts(baselines=default), CELLS[1]: down})
        with open_store() as store:
            assert store.facts(KEY, cell) == CellFacts(baselines=default, roofline_us={"up": 10.25}, runs={"a": long})
            store.load(KEY, CELLS)
            store.writer(KEY)
            store.add_facts(KEY, {cell: CellFacts(runs={"a": Run("a", finished=True)})})
            assert store.runs(KEY) == [Run("a", finished=True)]
        with open_store() as store:
            assert store.runs(KEY) == [Run("a", finished=True)]
            store.add_facts(KEY, {cell: CellFacts(runs={"a": long})})
        with open_store() as store:
            assert store.facts(KEY, cell).runs == {"a": long}
            assert store.facts(KEY, cell).roofline_us == {"up": 10.25}
            assert store.facts(KEY, CELLS[1]) == down

    def test_keys_of_several_gpus(self, open_store: Open) -> None:
        other = replace(KEY, provenance=replace(KEY.provenance, driver="580.1"))
        fill(open_store(), made_up(12))
        fill(open_store(), made_up(8), other)
        with open_store() as store:
            found = {summary.key: summary for summary in store.keys()}  # noqa: SIM118  (no dict)
            assert {key: summary.trials for key, summary in found.items()} == {KEY: 12, other: 8}
            states = sum((Counter(states) for states in found[KEY].cells.values()), Counter())
            assert states == {"COMPLETE": 4, "PRUNED": 8}
            (notice,) = store.notices(other)
            assert "driver is 580.1, was 570.86" in notice
            assert "12 trials" in notice

    def test_stale_running_rows_are_swept_with_a_reason(self, open_store: Open) -> None:
        cell, reason = CELLS[0], "left RUNNING by a process that ended"
        with open_store() as store:
            store.load(KEY, [cell])
            study = store.optuna_study(KEY, cell)
            study.ask().suggest_int("BLOCK_SIZE_M", 8, 512, log=True)
            store.lock(KEY)
            # In a file that is locked nobody else can be at it; elsewhere it may be another machine's.
            if not store.exclusive:
                assert store.load(KEY, [cell]) == {cell: []}
                assert study.trials[0].state.name == "RUNNING"
                store.backend.sweep([study._study_id], -1.0, reason)
        with open_store() as store:
            store.lock(KEY)
            assert store.load(KEY, [cell]) == {cell: []}
            (swept,) = store.optuna_study(KEY, cell).trials
            assert (swept.state.name, swept.user_attrs["reason"]) == ("FAIL", reason)

    def test_a_running_row_that_ends_in_between_is_not_swept(
        self, open_store: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cell = CELLS[0]
        with open_store() as store:
            store.load(KEY, [cell])
            study = store.optuna_study(KEY, cell)
            late, left = study.ask(), study.ask()
            running = store.backend.storage.get_all_trials(study._study_id)
            study.tell(late, 1.5)  # as another process does between the look and the sweep
            monkeypatch.setattr(store.backend.storage, "get_all_trials", lambda *_, **__: running)
            assert store.backend.sweep([study._study_id], -1.0, "left RUNNING") == 1
            monkeypatch.undo()
        with open_store() as store:
            states = {t.number: t.state.name for t in store.optuna_study(KEY, cell).trials}
        assert states == {late.number: "COMPLETE", left.number: "FAIL"}

    def test_a_repeated_batch_is_stored_once(self, open_store: Open) -> None:
        """The commit may have happened although the connection was lost before it was confirmed."""
        given, now = made_up(24), datetime.now()
        with open_store() as store:
            store.load(KEY, CELLS)
            writer = store.writer(KEY)
            rows = [writer._row(m.job.cell, m, "run", i, now, now) for i, m in enumerate(given)]
            store.backend.add_trials(rows)
            store.backend.add_trials(rows, retry=True)
            assert sum(len(trials) for trials in store.load(KEY, CELLS).values()) == len(given)

    def test_unknown_study_is_named(self, open_store: Open) -> None:
        with open_store() as store, pytest.raises(StorageError, match="M=00777"):
            store.optuna_study(KEY, Cell("up", 777))
