"""kill -9 at 20 random points of a tune: what is lost, what is timed twice, how it ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.gpu_run import machine_facts
from moeopt.storage.store import StudyStore

RECORDING = "moeopt/recordings/data/h200-E256-top8-K3072-N256-bf16.jsonl.gz"
ROOT = Path(__file__).parents[2]
POINTS = 20


@dataclass(frozen=True)
class Line:
    """One measurement, as the device wrote it down."""

    when: float
    job: str

    @classmethod
    def read(cls, path: Path) -> list[Line]:
        if not path.exists():
            return []
        parts = [text.split(" ", 1) for text in path.read_text().splitlines()]
        return [cls(float(when), job) for when, job in parts]


class Runner:
    """Starts tunes in a process of their own, kills them at a given number of measurements."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.kill_run", RECORDING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def run(
        self, directory: Path, storage: str, name: str, *, kill_after: int | None = None, jitter_s: float = 0
    ) -> int:
        log = directory / f"{name}.log"
        order = {"storage": storage, "log": str(log), "result": str(directory / f"{name}.json")}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if kill_after is not None:
            while len(Line.read(log)) < kill_after:
                time.sleep(0.002)
            time.sleep(jitter_s)
            os.kill(pid, signal.SIGKILL)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()


def _stored(storage: str) -> list[str]:
    with StudyStore(storage, create=False) as store:
        return [
            f"{cell.role} {cell.batch_size} {trial.measurement.job.config}"
            for summary in store.keys()  # noqa: SIM118  (no dict)
            for cell, trials in store.load(summary.key, list(summary.cells)).items()
            for trial in trials
        ]


def _end(path: Path) -> dict[str, object]:
    """A result without what differs between any two runs."""
    result = json.loads(path.read_text())
    return {name: value for name, value in result.items() if name not in ("wall_s", "counts", "timings", "notes")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_killed_at_random_points(kind: str, runner: Runner, tmp_path: Path) -> None:
    suffix = {"sqlite": "db", "journal": "journal"}[kind]
    points = POINTS if kind == "sqlite" else 2
    assert runner.run(tmp_path, str(tmp_path / f"whole.{suffix}"), "whole") == 0
    whole = Line.read(tmp_path / "whole.log")
    # The engine's defaults are timed first; they are no trials, and may be tried as one later.
    defaults = len(whole) - len(_stored(str(tmp_path / f"whole.{suffix}")))

    random_ = random.Random(11)
    rows = []
    for number in range(points):
        storage = str(tmp_path / f"{number}.{suffix}")
        kill_after = random_.randrange(1, len(whole))
        status = runner.run(tmp_path, storage, f"{number}-a", kill_after=kill_after, jitter_s=random_.random() * 0.01)
        killed = time.time()
        assert status == -signal.SIGKILL
        before = Line.read(tmp_path / f"{number}-a.log")[defaults:]
        stored = set(_stored(storage)) if Path(storage).exists() else set()
        assert runner.run(tmp_path, storage, f"{number}-b") == 0
        after = Line.read(tmp_path / f"{number}-b.log")
        trials = set(_stored(storage))
        lost = [line for line in before if line.job in trials and line.job not in stored]
        old = [line for line in lost if killed - line.when > 1.0]
        twice = [line for line in after if line.job in stored]
        same = _end(tmp_path / f"{number}-b.json") == _end(tmp_path / "whole.json")
        rows.append(
            {
                "killed_after": len(before), "of": len(whole) - defaults, "stored": len(stored), "lost": len(lost),
                "lost_older_than_1_s": len(old), "timed_twice": len(twice), "same_end": same,
            }
        )  # fmt: skip
        assert not old
        assert not twice
        assert same
        assert len(_stored(storage)) == len(trials), "no trial is stored twice"
    artifacts = ROOT / "test-artifacts"
    artifacts.mkdir(exist_ok=True)
    table = ["| " + " | ".join(rows[0]) + " |", "| --- " * len(rows[0]) + "|"]
    table += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    (artifacts / f"kill-{kind}.md").write_text("\n".join(table) + "\n")
    content = {"command": "pytest tests/storage/test_kill.py", "machine": machine_facts(None), "recording": RECORDING}
    (artifacts / f"kill-{kind}.json").write_text(json.dumps({**content, "points": rows}, indent=1) + "\n")
