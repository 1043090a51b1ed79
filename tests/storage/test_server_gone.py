"""The database server is killed (kill -9) under a whole ``moeopt tune``, and comes back or does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeopt.storage.store import StudyStore

from .server import PASSWORD, PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.postgres]
DEFAULTS = 2  # timed before the first trial, as far as the recording has them
ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server of this test's own, as it is killed; how MariaDB is waited for: test_workers.py."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


class Tune:
    """A ``moeopt tune`` in a process of its own."""

    def __init__(self, directory: Path, recording: Path, storage: str, name: str, give_up_s: float = 60) -> None:
        self.storage = storage
        self._log, self.json = directory / f"{name}.log", directory / f"{name}.json"
        command = [
            sys.executable, "-m", "tests.storage.slow_cli", "tune", "--gpu", f"recorded:{recording}", "--trials", "16",
            "--seed", "3", "--storage", storage, "--json", str(self.json),
        ]  # fmt: skip
        env = {**os.environ, "TIMED_LOG": str(self._log), "GIVE_UP_S": str(give_up_s), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @property
    def timed(self) -> list[str]:
        """What the device has timed so far."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def wait_for(self, timed: int) -> None:
        while len(self.timed) < timed and self.process.poll() is None:
            time.sleep(0.01)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=200)
        assert PASSWORD not in out + err + (self.json.read_text() if self.json.exists() else "")
        return self.process.returncode, out, err

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.json.read_text())
        return found


def _stored(url: str) -> list[str]:
    with StudyStore(url, create=False) as store:
        return [
            f"{cell.role} {cell.batch_size} {trial.measurement.job.config}"
            for summary in store.keys()  # noqa: SIM118  (no dict)
            for cell, trials in store.load(summary.key, list(summary.cells)).items()
            for trial in trials
        ]


def test_it_comes_back(own_server: PostgresServer, tiny_recording: Callable[..., Path], tmp_path: Path) -> None:
    recording = tiny_recording()
    whole = Tune(tmp_path, recording, own_server.create_database("whole"), "whole")
    code, out, err = whole.end()
    assert code == 0, out + err
    url = own_server.create_database("killed")
    tune = Tune(tmp_path, recording, url, "killed")
    tune.wait_for(30)
    own_server.kill()
    time.sleep(2.0)
    own_server.start()
    code, out, err = tune.end()
    assert code == 0, out + err
    assert tune.result()["batch_sizes"] == whole.result()["batch_sizes"], "the same end"
    assert sorted(tune.timed) == sorted(whole.timed), "nothing is timed twice"
    assert sorted(_stored(url)) == sorted(_stored(whole.storage)), "nothing is lost, nor stored twice"


def test_it_does_not_come_back(own_server: PostgresServer, tiny_recording: Callable[..., Path], tmp_path: Path) -> None:
    """The tune ends with what it has, and says so; the next one goes on from what was stored."""
    recording, url = tiny_recording(), own_server.create_database("gone")
    tune = Tune(tmp_path, recording, url, "gone", give_up_s=2)
    tune.wait_for(40)
    own_server.kill()
    code, out, err = tune.end()
    assert code == 2, out + err
    assert len([line for line in err.splitlines() if line.startswith("moeopt: ")]) == 1, err
    assert "Traceback" not in err
    assert "these are the best so far" in out
    counts, rows = tune.result()["counts"], tune.result()["batch_sizes"]
    assert rows, "the best of what was timed"
    assert counts["measured"] + counts["failed"] >= len(tune.timed) - DEFAULTS, (
        "what was timed and not stored is in the result"
    )

    own_server.start()
    stored = set(_stored(url))
    again = Tune(tmp_path, recording, url, "again")
    assert again.end()[0] == 0
    assert not stored & set(again.timed), "nothing is timed twice that was stored"
    assert set(again.result()["batch_sizes"]) == {"1", "16", "64"}
