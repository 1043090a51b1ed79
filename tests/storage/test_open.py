"""What cannot be opened is said in one line, without a password, and nothing is damaged."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt.core.trial import Measurement
from moeopt.errors import StorageError
from moeopt.storage.journal import repair
from moeopt.storage.store import StudyKey, StudyStore
from moeopt.storage.url import StorageUrl
from moeopt.testing.suites.storage import CELLS

from .server import PostgresServer


@pytest.mark.parametrize(
    ("text", "kind", "display"),
    [
        ("/a/b.db", "sqlite", "/a/b.db"),
        ("sqlite:////a/b.db", "sqlite", "/a/b.db"),
        ("/a/b.journal", "journal", "/a/b.journal"),
        ("journal:///a/b", "journal", "/a/b"),
        ("postgresql://u:pw@h:5/d", "server", "postgresql://u:***@h:5/d"),
        ("postgresql+psycopg://u@h/d", "server", "postgresql://u@h/d"),
        ("postgres://u:p%40w@h/d", "server", "postgresql://u:***@h/d"),
        ("mysql://u:pw@h/d", "server", "mysql://u:***@h/d"),
    ],
)
def test_urls(text: str, kind: str, display: str) -> None:
    url = StorageUrl.parse(text)
    assert (url.kind, url.display) == (kind, display)
    assert "pw" not in repr(url)


@pytest.mark.parametrize(
    "text",
    ["", "redis://h", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:a.db", "postgresql://u:pw@h", "journal://",
     "postgresql://u:pw@h:port/d"],
)  # fmt: skip
def test_urls_that_are_none(text: str) -> None:
    with pytest.raises(StorageError) as caught:
        StorageUrl.parse(text)
    assert "pw" not in str(caught.value)
    assert "\n" not in str(caught.value)


def _new(path: Path) -> Path:
    """A database without studies."""
    with StudyStore(path) as store:
        store.backend.studies()
    return path


def test_not_a_database(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_text("hello, I am a text file of some length\n" * 100)
    before = path.read_bytes()
    with pytest.raises(StorageError, match="is not a SQLite database"):
        StudyStore(path)
    assert path.read_bytes() == before
    path.rename(tmp_path / "a.journal")
    with pytest.raises(StorageError, match="is not an Optuna journal"):
        StudyStore(tmp_path / "a.journal")
    assert (tmp_path / "a.journal").read_bytes() == before


def test_a_damaged_database(tmp_path: Path) -> None:
    path = _new(tmp_path / "a.db")
    data = bytearray(path.read_bytes())
    data[100:8000] = b"\xff" * 7900
    path.write_bytes(data)
    with pytest.raises(StorageError, match="damaged or not a database"):
        StudyStore(path)


def test_a_newer_schema(tmp_path: Path) -> None:
    path = _new(tmp_path / "a.db")
    with sqlite3.connect(path) as connection:
        connection.execute("update alembic_version set version_num = 'v99.0.0.a'")
    connection.close()
    with pytest.raises(StorageError, match="newer Optuna"):
        StudyStore(path)


def test_a_directory_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is a directory"):
        StudyStore(tmp_path)
    with pytest.raises(StorageError, match="there is no database"):
        StudyStore(tmp_path / "a.db", create=False)
    assert not (tmp_path / "a.db").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot make the directory"):
        StudyStore(tmp_path / "file" / "deep" / "a.db")
    with StudyStore(tmp_path / "new" / "deep" / "a.db") as store:
        assert not (tmp_path / "new").exists(), "it is made when it is used"
        assert store.keys() == []
    assert (tmp_path / "new" / "deep" / "a.db").exists()


_OPEN = """
import os, sys
import moeopt.storage.journal, moeopt.storage.rdb
from moeopt.errors import StorageError
from moeopt.storage.store import StudyStore
if os.geteuid() == 0:  # whom no permission stops
    os.setgid(65534)
    os.setuid(65534)
for path in sys.argv[1:]:
    try:
        StudyStore(path)
    except StorageError as error:
        print(error)
    else:
        print("opened")
"""


def test_read_only(tmp_path: Path) -> None:
    _new(tmp_path / "a.db").chmod(0o444)
    paths = [str(tmp_path / name) for name in ("a.db", "b.db", "c.journal", "new/d.db")]
    # Down from pytest's own directory, which only its owner may enter; under xdist it is one level further up.
    above = [d for d in tmp_path.parents if d.name.startswith(("pytest-", "popen-"))]
    for directory in (tmp_path, *above):
        directory.chmod(0o555)
    try:
        out = subprocess.run([sys.executable, "-c", _OPEN, *paths], capture_output=True, text=True, check=False)
    finally:
        for directory in (tmp_path, *above):
            directory.chmod(0o755)
    lines = out.stdout.splitlines()
    assert len(lines) == len(paths), out.stderr
    assert all("read-only" in line or "Permission denied" in line for line in lines), lines


def test_a_directory_that_may_not_be_entered(tmp_path: Path) -> None:
    """As another user where this is root, who enters every directory."""
    above = [d for d in tmp_path.parents if d.name.startswith(("pytest-", "popen-"))]
    for directory in (tmp_path, *above):
        directory.chmod(0o755)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    paths = [str(closed / "a.db"), str(closed / "new" / "b.db")]
    try:
        out = subprocess.run([sys.executable, "-c", _OPEN, *paths], capture_output=True, text=True, check=False)
    finally:
        closed.chmod(0o755)
    lines = out.stdout.splitlines()
    assert len(lines) == 2, out.stderr
    assert all("may not be entered" in line for line in lines), lines


@pytest.mark.postgres
def test_a_wrong_password_is_not_shown(postgres: PostgresServer) -> None:
    with pytest.raises(StorageError, match="password authentication failed") as caught:
        StudyStore(postgres.url_of("postgres", "wr0ng-Pa55"))
    assert "wr0ng" not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(StorageError, match="does not exist"):
        StudyStore(postgres.url_of("nowhere"))


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(StorageError, match="refused"):
        StudyStore("postgresql://u:pw@127.0.0.1:9/d")


def test_two_runs_of_one_study(tmp_path: Path, key: StudyKey) -> None:
    from dataclasses import replace

    with StudyStore(tmp_path / "a.db") as one, StudyStore(tmp_path / "a.db") as two:
        one.load(key, CELLS)
        one.lock(key)
        one.lock(key)
        with pytest.raises(StorageError, match=r"another run \(process \d+\) is tuning E256"):
            two.lock(key, wait_s=0.2)
        two.lock(replace(key, gpu="another"), wait_s=0)
        one.close()
        two.lock(key, wait_s=0.2)


def test_a_full_disk_holds_measurements_back(
    tmp_path: Path, key: StudyKey, measurements: Callable[[int], list[Measurement]]
) -> None:
    """SQLite answers "database or disk is full" for its own page limit as for a full disk."""
    path = tmp_path / "a.db"
    given = measurements(400)
    with StudyStore(path) as store:
        store.load(key, CELLS)
        from sqlalchemy import event

        from moeopt.storage.rdb import RdbBackend

        backend = store.backend
        assert isinstance(backend, RdbBackend)
        limit = {"pages": 60}

        @event.listens_for(backend.engine, "checkout")
        def _limit(connection: sqlite3.Connection, record: object, proxy: object) -> None:
            connection.execute(f"PRAGMA max_page_count={limit['pages']}")

        writer = store.writer(key, give_up_s=3.0)
        for number, measurement in enumerate(given):
            writer.put(measurement.job.cell, measurement, "run", number)
        with pytest.raises(StorageError, match="full"):
            writer.flush()
        limit["pages"] = 100_000
        writer.close()
        assert writer.stored == len(given)
    with StudyStore(path) as store:
        assert sum(len(trials) for trials in store.load(key, CELLS).values()) == len(given)


def _journal(path: Path, key: StudyKey, measurements: list[Measurement]) -> None:
    with StudyStore(path) as store:
        store.load(key, CELLS)
        writer = store.writer(key)
        for number, measurement in enumerate(measurements):
            writer.put(measurement.job.cell, measurement, "run", number)


def test_a_torn_journal_tail_is_cut(
    tmp_path: Path, key: StudyKey, measurements: Callable[[int], list[Measurement]]
) -> None:
    path = tmp_path / "a.journal"
    given = measurements(20)
    _journal(path, key, given)
    whole = path.read_bytes()
    last = whole[: whole[:-1].rindex(b"\n") + 1]
    for cut in (1, 7, len(whole) - len(last) - 1):
        path.write_bytes(whole[: len(whole) - cut])
        with StudyStore(path) as store:
            assert sum(len(trials) for trials in store.load(key, CELLS).values()) == len(given) - 1
            writer = store.writer(key)
            writer.put(given[-1].job.cell, given[-1], "run", 19)
            writer.close()
        with StudyStore(path) as store:
            assert sum(len(trials) for trials in store.load(key, CELLS).values()) == len(given)


def test_repair_leaves_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    assert repair(path) == 0
    path.write_bytes(b"")
    assert repair(path) == 0
    path.write_bytes(b'{"a":1}\n')
    assert repair(path) == 0
    path.write_bytes(b'{"a":1}\n{"b"')
    assert repair(path) == 4
    assert path.read_bytes() == b'{"a":1}\n'
    path.write_bytes(b'{"a":1')
    assert repair(path) == 6
    assert path.read_bytes() == b""
