"""Study databases that cannot be used: one clear line, exit status 2, nothing corrupted, no password shown."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeopt.storage.store import StudyStore
from tests.cli.conftest import Run
from tests.storage.conftest import mariadb, postgres, server  # noqa: F401  (fixtures)
from tests.storage.mariadb import MariaServer
from tests.storage.server import PASSWORD, PostgresServer

Write = Callable[..., Path]
ROOT = Path(__file__).parents[2]
TUNE = ["tune", "--gpu", "recorded:tiny.jsonl.gz", "--trials", "2", "--batch-sizes", "16"]
READERS = [["status"], ["report", "r.html"], ["export", "sglang:out"], ["dashboard", "--port", "0"]]


def _refused(done: Any, message: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(
    "command", [TUNE, ["status"], ["worker", "--gpu", "recorded:tiny.jsonl.gz"]], ids=lambda c: c[0]
)
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://u:s3cret@h/x", "storage scheme 'redis' is unknown"),
        ("postgresql://u:s3cret@h:port/d", "the storage URL cannot be read"),
        ("postgresql://u:s3cret@h", "names no database"),
        ("postgresql://u:s3cret@127.0.0.1:9/d", "refused"),
        ("mysql://u:s3cret@127.0.0.1:9/d", "refused"),
        ("sqlite:///", "names no file"),
    ],
)
def test_wrong_urls(run: Run, tiny_recording: Write, command: list[str], url: str, message: str) -> None:
    tiny_recording()
    done = run(*command, "--storage", url)
    _refused(done, message)
    assert "s3cret" not in done.stdout + done.stderr


def test_a_wrong_password(run: Run, tiny_recording: Write, server: PostgresServer | MariaServer) -> None:  # noqa: F811
    tiny_recording()
    for command in (TUNE, ["status"]):
        done = run(*command, "--storage", server.url_of("postgres", "wr0ng-Pa55"))
        _refused(done, "password")
        assert "wr0ng" not in done.stdout + done.stderr


@pytest.mark.parametrize("command", [TUNE, *READERS], ids=lambda c: c[0])
@pytest.mark.parametrize("kind", ["newer", "text", "damaged"])
def test_files_that_are_no_database_of_ours(
    run: Run, tiny_recording: Write, tmp_path: Path, command: list[str], kind: str
) -> None:
    tiny_recording()
    path = tmp_path / "x.db"
    with StudyStore(path) as store:
        assert store.keys() == []
    if kind == "newer":
        with sqlite3.connect(path) as connection:
            connection.execute("update alembic_version set version_num = 'v99.0.0.a'")
        connection.close()
    elif kind == "text":
        path.write_text("a text file")
    else:
        path.write_bytes(path.read_bytes()[:100] + b"\xff" * 7900)
    before = path.read_bytes()
    messages = {"newer": "made by a newer Optuna", "text": "is not a SQLite database", "damaged": "damaged or not a"}
    _refused(run(*command, "--storage", "x.db"), messages[kind])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "args",
    [
        ["--gpu", "recorded:none.gz"],
        ["--gpu", "recorded:tiny.jsonl.gz", "--batch-sizes", "17"],
        ["--gpu", "recorded:tiny.jsonl.gz", "--space", "nosuch"],
        ["--gpu", "recorded:tiny.jsonl.gz", "--kernel", "vllm"],
    ],
    ids=lambda args: args[-1],
)
@pytest.mark.parametrize("storage", ["deep/x.db", "deep/x.journal"])
def test_a_refused_run_leaves_no_database(
    run: Run, tiny_recording: Write, tmp_path: Path, args: list[str], storage: str
) -> None:
    tiny_recording()
    done = run("tune", *args, "--storage", storage)
    assert done.returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.jsonl.gz"]


@pytest.mark.parametrize("command", [*READERS, ["worker", "--gpu", "recorded:tiny.jsonl.gz"]], ids=lambda c: c[0])
def test_readers_make_no_database(run: Run, tmp_path: Path, command: list[str]) -> None:
    assert run(*command, "--storage", "x.db").returncode == 2
    assert not (tmp_path / "x.db").exists()


def _run_in(directory: Path, *args: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """``moeopt ARGS`` in a process of its own."""
    command = [*before, sys.executable, "-m", "moeopt.cli", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_read_only_directory(tiny_recording: Write, tmp_path: Path) -> None:
    """Also as root, once it has no right to pass over permissions."""
    tiny_recording()
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o555)
    before = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    done = _run_in(tmp_path, *TUNE, "--storage", "there/x.db", before=before)
    _refused(done, "there is read-only")
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.slow
def test_two_runs_of_one_study_at_once(tiny_recording: Write, tmp_path: Path) -> None:
    """The second is refused and the first goes on; another study in the same file is no hindrance."""
    path = tiny_recording()
    other = tiny_recording("other.jsonl.gz", kernel_hash="fedcba9876543210")
    command = [
        sys.executable,
        "-m",
        "tests.storage.slow_cli",
        "tune",
        "--trials",
        "60",
        "--storage",
        str(tmp_path / "x.db"),
    ]
    log = tmp_path / "log"
    first = subprocess.Popen(
        [*command, "--gpu", f"recorded:{path}"], cwd=ROOT, env={**os.environ, "TIMED_LOG": str(log)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGSTOP)  # so that it cannot end too early
    try:
        args = [*TUNE, "--storage", "x.db"]
        second = _run_in(tmp_path, *args)
        args[2] = f"recorded:{other}"
        third = _run_in(tmp_path, *args)
    finally:
        first.send_signal(signal.SIGCONT)
    _refused(second, f"another run (process {first.pid}) is tuning E8-top2-K256-N128-bf16")
    assert third.returncode == 0, third.stderr
    first.terminate()
    out, err = first.communicate(timeout=120)
    assert first.returncode == 130, out + err


@pytest.mark.slow
def test_a_full_disk(tiny_recording: Write, tmp_path: Path) -> None:
    """A real one: the tune ends with its result, says what was not stored, and the file is sound."""
    path = tiny_recording()
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=400k none {disk}"
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no file system can be mounted here: tests/storage/test_open.py fills SQLite's own limit")
    script = tmp_path / "script.py"
    script.write_text(
        "from moeopt.storage.store import StudyStore\n"
        "StudyStore.writer.__kwdefaults__['give_up_s'] = 1.0\n"
        "from moeopt.cli import main\n"
        "main()\n"
    )
    args = f"--gpu recorded:{path} --trials 60 --storage {disk}/x.db --json {tmp_path}/r.json"
    tune = f"{sys.executable} {script} tune {args}"
    keep = f"cp {disk}/x.db* {tmp_path}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{mount} && {tune}; status=$?; {keep}; exit $status"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("moeopt: ") and "full" in last
    assert json.loads((tmp_path / "r.json").read_text())["batch_sizes"], "the result is there"
    with StudyStore(tmp_path / "x.db", create=False) as store:
        assert len(store.keys()) <= 1


@pytest.mark.slow
def test_a_password_is_nowhere(
    run: Run, tiny_recording: Write, server: PostgresServer | MariaServer, tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """In no output, log, exported file, report, note or attribute of a whole tune and what comes after it."""
    import logging

    import moeopt
    from moeopt.report.dashboard import annotate

    tiny_recording()
    storage = server.create_database(f"secret{os.getpid()}")
    assert PASSWORD in storage
    caplog.set_level(logging.DEBUG)
    commands = [
        [*TUNE, "--json", "r.json", "--export", "sglang:out", "--report", "tune.html"],
        ["status"], ["status", "--json"], ["export", "sglang:again"], ["report", "report.html"],
        ["verify", "--gpu", "recorded:tiny.jsonl.gz"], ["export", "sglang:x", "--key", "nosuch"],
        ["worker", "--gpu", "recorded:tiny.jsonl.gz", "--idle", "1s"],
    ]  # fmt: skip
    said = []
    for command in commands:
        done = run(*command, "--storage", storage)
        said.append(done.stdout + done.stderr)
        assert done.returncode == (2 if "nosuch" in command else 0), done.stderr
    result = moeopt.load(storage)
    said += [repr(result), str(result), json.dumps(result.to_dict())]
    with StudyStore(storage) as store:
        annotate(store)
        said += [repr(store), store.display, repr(store.keys())]
        with store.backend.begin() as connection:  # type: ignore[attr-defined]
            from sqlalchemy import MetaData

            metadata = MetaData()
            metadata.reflect(connection)
            said += [str(connection.execute(table.select()).all()) for table in metadata.tables.values()]
    assert any("moeopt_jobs" in table for table in metadata.tables)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".html"}
    said += [path.read_text(errors="replace") for path in files] + [caplog.text]
    assert not [text for text in said if PASSWORD in text]
