"""Study databases that commit 6261dc7 wrote open, resume and are written the same."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
import pytest

import moeopt
from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import InvalidInputError
from moeopt.storage.key import StudyKey
from moeopt.storage.store import StudyStore
from tests.cli.conftest import Run
from tests.storage.server import PostgresServer

from .conftest import DATA, Unpack, old_json
from .stored import DISTRIBUTIONS, Study, exact, from_sql, joined, studies

TRIALS = 8
FINISHED = ("finished.db", "joint.db", "wide.db", "journal.journal")
CUT = ("cut.db", "cutjournal.journal")
# What a run does not repeat, whatever the search.
LIVELY = ("wall_s", "timings", "counts", "notes")


def _command(database: str) -> list[str]:
    """The command that made a database: see make.py."""
    name = database.partition(".")[0]
    return [
        "tune", "--gpu", f"recorded:{'wide' if name == 'wide' else 'recording'}.jsonl.gz", "--batch-sizes", "1,16,64",
        "--mode", "joint" if name == "joint" else "split", "--space", "wide" if name == "wide" else "grid", "--trials",
        str(TRIALS), "--seed", "3", "--storage", database, "--json", "out.json",
    ]  # fmt: skip


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _steady(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in LIVELY}


def _rows(result: dict[str, Any]) -> Any:
    return result["batch_sizes"]


def _form(value: Any) -> Any:
    """Keys and types of a JSON value."""
    if isinstance(value, dict):
        return {key: _form(part) for key, part in value.items()}
    return type(value).__name__


def _same_trials(new: Study, old: Study) -> bool:
    return exact([vars(trial) for trial in new.trials]) == exact([vars(trial) for trial in old.trials])


# -- what a database says ---------------------------------------------------------------------------


@pytest.mark.parametrize("database", [*FINISHED, "tpe.db", "study.db"])
def test_load_and_export(database: str, unpack: Unpack, tmp_path: Path) -> None:
    name = database.partition(".")[0]
    result = moeopt.load(str(unpack(database)))
    old = old_json(f"{name}.json")
    assert _rows(result.to_dict()) == _rows(old)
    assert (result.gpu, result.mode, result.info.recorded) == (old["gpu"], old["mode"], True)
    assert result.shape.to_dict() == old["shape"]
    for folder in sorted((DATA / f"{name}-files").glob("*vllm*")) + sorted((DATA / f"{name}-files").glob("sglang")):
        engine = folder.name if folder.is_dir() else "vllm"
        result.export(engine, tmp_path / "out" / engine)
        expected = _files(folder) if folder.is_dir() else {folder.name: folder.read_bytes()}
        assert _files(tmp_path / "out" / engine) == expected


@pytest.mark.parametrize("driver", ["570.1", "580.2"])
def test_load_and_export_of_one_of_two_keys(driver: str, unpack: Unpack, tmp_path: Path) -> None:
    status = old_json("live.status.json")["studies"]
    digest = next(one["key"]["digest"] for one in status if one["key"]["driver"] == driver)
    with pytest.raises(InvalidInputError, match=f"2 results that fit.*{digest}"):
        moeopt.load(str(unpack("live.db")))
    result = moeopt.load(str(unpack("live.db")), key=digest)
    old = old_json(f"live-{driver}.json")
    assert _rows(result.to_dict()) == _rows(old), "the finalists' times count"
    assert (result.info.driver, result.info.recorded) == (driver, False)
    result.export("sglang", tmp_path / "out")
    assert _files(tmp_path / "out") == _files(DATA / "live-files" / driver)


@pytest.mark.parametrize("database", [*FINISHED, *CUT, "tpe.db", "cuttpe.db", "live.db", "notes.db"])
def test_status(database: str, unpack: Unpack, run: Run) -> None:
    unpack(database)
    done = run("status", "--storage", database, "--json")
    assert done.returncode == 0, done.stderr
    new, old = json.loads(done.stdout), old_json(f"{database.partition('.')[0]}.status.json")
    for one, before in zip(new["studies"], old["studies"], strict=True):
        # Local time: that of the machine which reads it.
        assert abs((_time(one) - _time(before)).total_seconds()) < 86400
        one["last_trial"] = before["last_trial"]
        assert one["seconds_left"] is None, "nothing is going on"
        before["seconds_left"] = None
    new["storage"] = Path(new["storage"]).name
    assert exact(new) == exact(old)


def _time(status: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(status["last_trial"])


def test_export_and_verify_commands(unpack: Unpack, run: Run, tmp_path: Path) -> None:
    unpack("recording.jsonl.gz", "finished.db")
    done = run(
        "export", "sglang:exported", "--storage", "finished.db", "--ladder", "auto", "--json", "export.json"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert _files(tmp_path / "exported") == _files(DATA / "finished-files" / "sglang")
    new = (tmp_path / "export.json").read_text().replace(f"{tmp_path}/", "OUT/")
    assert json.loads(new) == old_json("export.json")
    done = run(
        "verify", "--storage", "finished.db", "--gpu", "recorded:recording.jsonl.gz", "--passes", "4", "--json",
        "verify.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, old = json.loads((tmp_path / "verify.json").read_text()), old_json("verify.json")
    assert _form(found) == _form(old)
    for one in (found, old):  # words for people
        one["source"] = ""
        for row in one["batch_sizes"].values():
            row["reason"] = ""
    assert found == old


# -- going on ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("slow_recordings")
@pytest.mark.parametrize("database", FINISHED)
def test_a_finished_tune_times_nothing_again(database: str, unpack: Unpack, run: Run, tmp_path: Path) -> None:
    path = unpack(database)
    # What the lock of an old run has left: one slot of 16 bytes for each key, with a process id.
    path.with_name(f"{database}.run").write_bytes(b"\0" * 16 * 3000 + b"12345".ljust(16))
    before = studies(path)
    done = run(*_command(database), "--export", "sglang:out")
    assert done.returncode == 0, done.stderr
    new, old = json.loads((tmp_path / "out.json").read_text()), old_json(f"{database.partition('.')[0]}.json")
    assert exact(_steady(new)) == exact(_steady(old))
    assert set(new) == set(old)
    assert set(new["counts"]) == set(old["counts"])
    assert new["counts"]["measured"] == new["counts"]["failed"] == 0
    assert new["counts"]["resumed"] == sum(len(study.trials) for study in before.values())
    assert _files(tmp_path / "out") == _files(DATA / f"{database.partition('.')[0]}-files" / "sglang")
    after = studies(path)
    assert list(after) == list(before)
    for name, study in after.items():
        assert _same_trials(study, before[name])
        added = {key: value for key, value in study.attrs.items() if key not in before[name].attrs}
        assert exact({**before[name].attrs, **added}) == exact(study.attrs), "no fact has changed"
        assert all(key.startswith("run:") for key in added)


@pytest.mark.parametrize("database", CUT)
def test_a_tune_that_was_cut_off_ends(database: str, unpack: Unpack, run: Run, tmp_path: Path) -> None:
    path = unpack("recording.jsonl.gz", database)
    if database == "cutjournal.journal":
        data = path.read_bytes()
        whole = tmp_path / "whole.journal"
        whole.write_bytes(data[: data.rfind(b"\n") + 1])
        assert whole.stat().st_size < len(data), "its last line is torn"
        before = studies(whole)
    else:
        before = studies(path)
    done = run(*_command(database))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    _check_end(before, studies(path), result)
    if path.suffix == ".db":
        _check_plain_optuna(path)


def test_a_tune_with_one_of_optunas_samplers_that_was_cut_off_ends(unpack: Unpack) -> None:
    path = unpack("recording.jsonl.gz", "cuttpe.db")
    before = studies(path)
    result = _tune_with_tpe(path)
    _check_end(before, studies(path), result.to_dict())


def _check_end(before: dict[str, Study], after: dict[str, Study], result: dict[str, Any]) -> None:
    """Every cell is at its budget, nothing was timed twice, and what is new stands beside the old in the same form."""
    assert list(after) == list(before)
    timed = 0
    for name, study in after.items():
        old = before[name]
        assert len(study.timed()) == len(set(study.timed())) == TRIALS, name
        timed += len(study.timed()) - len(old.timed())
        kept = [vars(t) if t.state != "RUNNING" else {} for t in old.trials]
        now = [vars(t) if t.state != "FAIL" else {} for t in study.trials]
        assert exact(now[: len(kept)]) == exact(kept), "old trials are as they were"
        swept = [t for t in study.trials if t.state == "FAIL"]
        assert len(swept) == sum(t.state == "RUNNING" for t in old.trials)
        assert all("process that ended" in t.attrs["reason"] for t in swept)
        columns = {
            exact([sorted(t.params), [t.params[n][1] for n in sorted(t.params)]]) for t in study.trials if t.params
        }
        assert len(columns) == 1, "old and new trials have the same parameters and distributions"
        new = study.packed()[len(old.packed()) :]
        assert {packed.run for packed in new} <= set().union(*(s.runs for s in after.values()))
        assert all(study.attrs[key] == value for key, value in old.attrs.items() if not key.startswith("run:"))
    assert result["counts"]["measured"] == timed
    assert result["counts"]["resumed"] == sum(len(study.packed()) for study in before.values())
    runs = [study.runs for study in after.values() if study.runs]
    assert all(_form(run) == _form(before_run) for run in runs[0].values() for before_run in _runs(before))
    assert sum(run["finished"] for run in runs[0].values()) == 1


def _runs(found: dict[str, Study]) -> list[Any]:
    return [run for study in found.values() for run in study.runs.values()]


def _check_plain_optuna(path: Path) -> None:
    """Old and new trials are of one search space."""
    for name, stored in studies(path).items():
        study = optuna.load_study(study_name=name, storage=f"sqlite:///{path}")
        done = study.get_trials(states=(optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED))
        space = optuna.search_space.intersection_search_space(done, include_pruned=True)
        assert set(space) == set(stored.trials[0].params)
        assert study.best_value == min(t.value for t in stored.trials if t.state == "COMPLETE" and t.value is not None)


@pytest.mark.usefixtures("slow_recordings")
def test_a_run_of_one_of_optunas_samplers(unpack: Unpack, tmp_path: Path) -> None:
    """Its list of configs to try first is an attribute in several parts."""
    path = unpack("tpe.db")
    before = studies(path)
    kept = next(study.attrs for study in before.values() if study.runs)
    assert [key for key in kept if key.startswith("run:") and key.endswith((".000", ".001"))]
    result = _tune_with_tpe(path)
    old = old_json("tpe.json")
    assert _rows(result.to_dict()) == _rows(old)
    assert (result.counts.measured, result.counts.failed) == (0, 0)
    after = studies(path)
    assert all(_same_trials(study, before[name]) for name, study in after.items())
    assert all(exact(after[name].runs[tag]) == exact(run) for name, s in before.items() for tag, run in s.runs.items())


def test_a_journal_that_ends_within_an_attribute(unpack: Unpack) -> None:
    """kill -9 left one of the parts that the run's attribute was to have."""
    path = unpack("recording.jsonl.gz", "torn.journal")
    assert next(iter(studies(path).values())).trials == []
    _tune_with_tpe(path)
    assert all(len(study.timed()) == TRIALS for study in studies(path).values())


def _tune_with_tpe(path: Path) -> moeopt.TuneResult:
    return moeopt.tune(
        gpu=f"recorded:{path.parent / 'recording.jsonl.gz'}", batch_sizes=(1, 16, 64), trials=TRIALS, seed=3,
        storage=str(path), sampler=optuna.samplers.TPESampler(seed=1), progress=False,
    )  # fmt: skip


@pytest.mark.usefixtures("slow_recordings")
def test_a_study_file(unpack: Unpack, run: Run, tmp_path: Path) -> None:
    unpack("study.toml", "study.db")
    done = run("tune", "study.toml", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    new, old = json.loads((tmp_path / "out.json").read_text()), old_json("study.json")
    assert _steady(new) == _steady(old)
    assert new["counts"]["measured"] == 0
    assert _files(tmp_path / "study-files") == _files(DATA / "study-files")


# -- writing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", FINISHED)
def test_a_new_tune_writes_as_the_old_one_did(database: str, unpack: Unpack, run: Run, tmp_path: Path) -> None:
    old = studies(unpack("recording.jsonl.gz", "wide.jsonl.gz", database))
    fresh = f"fresh.{database.partition('.')[2]}"
    done = run(*[fresh if part == database else part for part in _command(database)])
    assert done.returncode == 0, done.stderr
    new = studies(tmp_path / fresh)
    assert sorted(new) == sorted(old), "names and digests"
    alike = 0
    for name, study in new.items():
        assert exact(_without_runs(study)) == exact(_without_runs(old[name]))
        assert [_form(run) for run in study.runs.values()] == [_form(run) for run in old[name].runs.values()]
        before = {packed.config: (trial, packed) for trial, packed in _measured(old[name])}
        for trial, packed in _measured(study):
            if packed.config in before and before[packed.config][1].us == packed.us:
                alike += 1
                assert exact(_without_run(vars(trial))) == exact(_without_run(vars(before[packed.config][0])))
    assert alike > len(new), "some configs were tried by both"


def _measured(study: Study) -> Any:
    return zip(study.trials, study.packed(), strict=True)


def _without_runs(study: Study) -> dict[str, Any]:
    return {key: value for key, value in joined(study.attrs).items() if not key.startswith("run:")}


def _without_run(trial: dict[str, Any]) -> dict[str, Any]:
    attrs = joined(trial["attrs"])
    return {**trial, "attrs": {**attrs, "moeopt": {**attrs["moeopt"], "run": "", "seq": 0}}}


@pytest.mark.parametrize("database", [*FINISHED, "tpe.db", "live.db"])
def test_what_is_read_is_written_the_same(database: str, unpack: Unpack, tmp_path: Path) -> None:
    """Trials of every status, with every fact, copied from store to store."""
    path = unpack(database)
    copy = tmp_path / f"copy.{database.partition('.')[2]}"
    with StudyStore(path, create=False) as source, StudyStore(copy) as target:
        for summary in source.keys():  # noqa: SIM118  (a method of ours, not a dict)
            cells = list(summary.cells)
            stored = source.load(summary.key, cells)
            target.load(summary.key, cells)
            target.add_facts(summary.key, {cell: source.facts(summary.key, cell) for cell in cells})
            with closing(target.writer(summary.key)) as writer:
                for cell, trials in stored.items():
                    for trial in trials:
                        writer.put(cell, trial.measurement, trial.run, trial.seq)
    old, new = studies(path), studies(copy)
    assert sorted(new) == sorted(old)
    for name, study in new.items():
        assert study.packed(), "every trial is consistent"
        assert exact(study.attrs) == exact(old[name].attrs)
        assert _same_trials(study, old[name])


def test_a_value_beyond_the_bounds_widens_its_distribution(tmp_path: Path) -> None:
    config = LaunchConfig(1024, 4, 1024, 256, 64, 13, maxnreg=256)
    key, cell = StudyKey.from_attrs(old_json("keys.json")[0]["attrs"]), Cell("up", 1)
    assert key is not None
    with StudyStore(tmp_path / "x.db") as store:
        store.load(key, [cell])
        with closing(store.writer(key)) as writer:
            writer.put(cell, Measurement(Job(cell, config), "ok", us=(1.5,)), "0123456789ab", 0)
    (study,) = studies(tmp_path / "x.db").values()
    found = {name: form["attributes"] for name, (_, form) in study.trials[0].params.items()}
    assert {name: (form["low"], form["high"]) for name, form in found.items()} == {
        "BLOCK_SIZE_M": (8, 1024), "BLOCK_SIZE_N": (4, 512), "BLOCK_SIZE_K": (16, 1024), "GROUP_SIZE_M": (1, 256),
        "num_warps": (1, 64), "num_stages": (1, 13), "maxnreg": (0, 256),
    }  # fmt: skip
    assert {name: form["log"] for name, form in found.items()} == {
        name: DISTRIBUTIONS[name]["attributes"]["log"] for name in found
    }


def test_all_parameters_were_written() -> None:
    """The files above hold every parameter that can be stored."""
    seen: set[str] = set()
    with gzip.open(DATA / "wide.db.gz") as file:
        data = file.read()
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(data)
        for study in from_sql(lambda query: connection.execute(query).fetchall()).values():
            seen.update(*(trial.params for trial in study.trials))
    assert seen == set(DISTRIBUTIONS)


# -- notes of the dashboard -------------------------------------------------------------------------


def test_notes_of_the_dashboard(unpack: Unpack, run: Run) -> None:
    """A note that nobody has edited is kept up to date; one that a person has edited stays."""
    pytest.importorskip("optuna_dashboard")
    from moeopt.report.dashboard import annotate

    path = unpack("recording.jsonl.gz", "notes.db")
    up, down = list(studies(path))
    mine = "a note that a person has edited"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "update study_system_attributes set value_json = ? where key = 'dashboard:note_str:0' and study_id = "
            "(select study_id from studies where study_name = ?)",
            (json.dumps(mine), down),
        )
    before = studies(path)
    done = run(
        "tune", "--gpu", "recorded:recording.jsonl.gz", "--batch-sizes", "16", "--trials", "5", "--storage", "notes.db"
    )
    assert done.returncode == 0, done.stderr
    with StudyStore(path) as store:
        annotate(store)
    after = studies(path)
    assert _note(after[down]) == mine
    assert _note(after[up]) != _note(before[up]), "it counts five timed configs now"
    assert "moeopt:shown" in after[up].system_attrs


def _note(study: Study) -> str:
    return "".join(value for key, value in sorted(study.system_attrs.items()) if key.startswith("dashboard:note_str:"))


# -- a server ---------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_a_servers_database_goes_on(postgres: PostgresServer, unpack: Unpack, run: Run, tmp_path: Path) -> None:
    """Its tune was killed while it shared its jobs: one is still claimed by the dead process."""
    import psycopg

    url = postgres.create_database("compat")
    with psycopg.connect(url) as connection, gzip.open(DATA / "server.sql.gz", "rt", encoding="utf-8") as file:
        connection.execute(file.read().encode())
    with psycopg.connect(url) as connection:
        before = from_sql(lambda query: connection.execute(query.encode()).fetchall())
        jobs = _jobs(connection)
    assert {state for _, _, state, _ in jobs} == {1, 2}
    unpack("recording.jsonl.gz")
    status = run("status", "--storage", url, "--json")
    assert sum(json.loads(status.stdout)["studies"][0]["trials"].values()) == sum(
        len(s.trials) for s in before.values()
    )
    done = run(*[url if part == "server.db" else part for part in _command("server.db")])
    assert done.returncode == 0, done.stderr
    with psycopg.connect(url) as connection:
        after = from_sql(lambda query: connection.execute(query.encode()).fetchall())
        jobs = _jobs(connection)
    _check_end(before, after, json.loads((tmp_path / "out.json").read_text()))
    by_config = {(name, packed.config): packed for name, study in after.items() for packed in study.packed()}
    for name, config, state, result in jobs:
        if state == 2:
            numbers = json.loads(config)
            assert json.dumps(numbers, separators=(",", ":")) == config
            assert exact(json.loads(result)) == exact(_plain(by_config[name, (*numbers[:7], bool(numbers[7]))]))


def _jobs(connection: Any) -> list[tuple[str, str, int, str]]:
    query = "select study_name, config, state, result from moeopt_jobs join studies using (study_id) order by job_id"
    return list(connection.execute(query).fetchall())


def _plain(packed: Any) -> dict[str, Any]:
    data = {**vars(packed), "config": list(packed.config), "us": list(packed.us)}
    return {key: value for key, value in data.items() if value not in (None, {})}
