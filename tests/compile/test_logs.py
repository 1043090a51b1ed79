"""Logs of compiles: those of failures stay, those that a killed run left go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeopt.compile import CompilePool
from moeopt.compile.logs import keep_log, running_log
from moeopt.core.shape import MoEShape
from tests.compile.faulty import FaultyKernel, config


@pytest.fixture
def make_pool(tmp_path: Path) -> CompilePool:
    (tmp_path / "scratch").mkdir()
    kernel = FaultyKernel(tmp_path / "scratch", 0.0)
    return CompilePool(kernel, MoEShape(8, 2, 256, 128), (12, 0), workers=1, cache_dir=tmp_path / "cache")


def test_a_pool_removes_what_a_killed_one_left(make_pool: CompilePool) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    logs = make_pool.log_dir
    logs.mkdir(parents=True)
    stale, recent, failed = (logs / f"{dead.pid}-ab-{name}" for name in ("1.log.running", "2.log.running", "3.log"))
    mine, other = running_log(logs, "ab-1"), logs / "notes.log.running"
    for path in (stale, recent, failed, mine, other):
        path.write_text("12 a config\n")
        if path != recent:
            os.utime(path, (time.time() - 3600,) * 2)
    with make_pool as pool:
        assert pool.submit(config(), "up", 64).result(60).failure is None
    assert sorted(logs.iterdir()) == sorted([recent, failed, mine, other])


def test_a_kept_log_has_a_lasting_name(tmp_path: Path) -> None:
    path = running_log(tmp_path, "ab-1")
    assert keep_log(path) is None
    path.write_text("said")
    kept = keep_log(path)
    assert kept is not None and kept.endswith(".log") and Path(kept).read_text() == "said" and not path.exists()


@pytest.mark.parametrize("fault", ["raise", "abort"])
def test_a_failure_names_its_log(make_pool: CompilePool, fault: str) -> None:
    with make_pool as pool:
        failure = pool.submit(config(fault), "up", 64).result(60).failure
        assert failure is not None and failure.log is not None and failure.log.endswith(".log")
        assert [Path(failure.log)] == list(pool.log_dir.iterdir())
