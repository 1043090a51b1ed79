"""Optuna's tables are as this package writes and reads them: what a new Optuna may change."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from moeopt.storage import tables

if TYPE_CHECKING:
    from pathlib import Path

# Table -> what is written or read of it.
USED = {
    "STUDIES": {"study_id", "study_name"},
    "DIRECTIONS": {"study_id", "direction", "objective"},
    "STUDY_ATTRS": {"study_id", "key", "value_json"},
    "STUDY_SYSTEM_ATTRS": {"study_id", "key", "value_json"},
    "TRIALS": {"trial_id", "number", "study_id", "state", "datetime_start", "datetime_complete"},
    "PARAMS": {"trial_id", "param_name", "param_value", "distribution_json"},
    "VALUES": {"trial_id", "objective", "value", "value_type"},
    "ROUNDS": {"trial_id", "step", "intermediate_value", "intermediate_value_type"},
    "ATTRS": {"trial_id", "key", "value_json"},
    "SYSTEM_ATTRS": {"trial_id", "key", "value_json"},
    "HEARTBEATS": {"trial_id", "heartbeat"},
}


@pytest.mark.parametrize("name", USED)
def test_columns(name: str) -> None:
    columns = getattr(tables, name).columns
    assert USED[name] <= set(columns.keys())
    needed = {c.name for c in columns if not c.nullable and not c.primary_key and c.default is None}
    assert needed <= USED[name], "a column that must be given is not"


def test_every_table_is_listed_here() -> None:
    assert {name for name, value in vars(tables).items() if hasattr(value, "columns")} == set(USED)


def test_enums_and_times() -> None:
    assert tables.TRIALS.c.state.type.enum_class is TrialState
    assert tables.DIRECTIONS.c.direction.type.enum_class is optuna.study.StudyDirection
    assert (tables.FINITE.name, tables.FINITE_ROUND.name) == ("FINITE", "FINITE")
    assert tables.VALUES.c.value_type.type.enum_class is type(tables.FINITE)
    assert tables.ROUNDS.c.intermediate_value_type.type.enum_class is type(tables.FINITE_ROUND)
    assert (int(importlib.metadata.version("optuna").partition(".")[0]) >= 5) == tables.STORES_UTC


def test_other_private_names(tmp_path: Path) -> None:
    """Of studies, trials and the journal's file."""
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage)
    assert study._study_id == storage.get_study_id_from_name(study.study_name) == storage.get_all_studies()[0]._study_id
    assert study.ask()._trial_id == storage.get_all_trials(study._study_id)[0]._trial_id
    assert JournalFileBackend(str(tmp_path / "a.journal"))._file_path == str(tmp_path / "a.journal")
