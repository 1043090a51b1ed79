"""Files that are written whole or not at all, and locks."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from moeopt.errors import ExportError
from moeopt.files import LockFile, check_writable, json_lines, replace_file, write_file

ROOT = Path(__file__).parents[1]


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "b.txt", "x")
    assert (tmp_path / "a" / "b.txt").read_text() == "x"
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        write_file(tmp_path / "file" / "b.txt", "x")
    with pytest.raises(ExportError, match="is not a directory"):
        check_writable(tmp_path / "file" / "deeper")
    check_writable(tmp_path / "not" / "yet")
    assert not (tmp_path / "not").exists()


def test_what_fails_its_check_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, "old")

    def refuse(copy: Path) -> None:
        assert copy.read_text() == "new"
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"):
        write_file(path, "new", check=refuse)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_file(path, b"new", check=Path.read_bytes)
    assert path.read_bytes() == b"new"


def test_json_lines_come_back_and_depend_on_the_rows_alone(tmp_path: Path) -> None:
    rows = [{"format": "µ", "list": [1, 2.5, None]}, {"b": "\n"}]
    write_file(tmp_path / "a.gz", json_lines(rows))
    time.sleep(1.1)  # gzip's header may hold a time in seconds
    assert json_lines(rows) == (tmp_path / "a.gz").read_bytes()
    with gzip.open(tmp_path / "a.gz", "rt", encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == rows
    (tmp_path / "a.gz").write_bytes(json_lines(rows)[:-9])
    with pytest.raises((OSError, EOFError)), gzip.open(tmp_path / "a.gz") as cut_off:
        cut_off.read()


def test_a_lock_has_one_holder_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    one, two = LockFile(path), LockFile(path)
    assert one.acquire(0)
    assert not two.acquire(0.1)
    assert (one.held, two.held) == (True, False)
    assert two.holder() == str(os.getpid())
    two.release()
    assert one.held, "one does not hold another's lock"
    one.release()
    assert not path.exists()
    assert two.holder() == ""
    assert two.acquire(0)
    two.release()
    with LockFile(path) as lock:
        assert lock.held
    assert list(tmp_path.iterdir()) == []


def test_a_lock_cannot_be_where_no_file_can(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        LockFile(ROOT / "README.md" / "a.lock").acquire(0)


_COUNT = """
import sys, pathlib
from moeopt.files import LockFile
path = pathlib.Path(sys.argv[1])
for _ in range(50):
    with LockFile(path.with_suffix(".lock")):
        path.write_text(str(int(path.read_text()) + 1))
"""


def test_the_file_that_goes_with_the_lock_lets_nobody_slip_in(tmp_path: Path) -> None:
    """Each release deletes the file that others wait for."""
    path = tmp_path / "count"
    path.write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", _COUNT, str(path)], cwd=ROOT) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert path.read_text() == "150"


_HOLD = """
import sys, pathlib, time
from moeopt.files import LockFile
lock = LockFile(pathlib.Path(sys.argv[1]))
assert lock.acquire(0)
print("held", flush=True)
time.sleep(600)
"""


def test_kill_9_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    lock = LockFile(path)
    assert not lock.acquire(0)
    assert lock.holder() == str(process.pid)
    threading.Timer(0.2, process.send_signal, (signal.SIGKILL,)).start()
    assert lock.acquire(30)
    process.wait()
    assert lock.holder() == str(os.getpid())
    lock.release()
