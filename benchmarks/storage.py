"""What storing costs: per trial in SQLite, PostgreSQL, MariaDB and a journal, and with eight workers at once.

    python -m benchmarks.storage [--trials 864] [--workers 8] [--jobs 3000] [--json benchmarks/results/storage.json]

The servers are started in temporary directories (Debian's packages `postgresql`, `mariadb-server-core`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import optuna

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_run import machine_facts  # noqa: E402
from moeopt.core.provenance import Provenance  # noqa: E402
from moeopt.core.shape import DEFAULT_BATCH_SIZES, ROLES, MoEShape  # noqa: E402
from moeopt.core.space import SearchSpace  # noqa: E402
from moeopt.core.trial import Cell, Job, Measurement, Resources  # noqa: E402
from moeopt.distributed.board import job_board  # noqa: E402
from moeopt.distributed.shared import SharedDevice  # noqa: E402
from moeopt.recordings.device import RecordedDevice  # noqa: E402
from moeopt.recordings.format import Recording  # noqa: E402
from moeopt.storage.backend import frozen_trial  # noqa: E402
from moeopt.storage.codec import TrialContext, encode  # noqa: E402
from moeopt.storage.store import StudyKey, StudyStore  # noqa: E402
from tests.storage.mariadb import MariaServer  # noqa: E402
from tests.storage.server import PostgresServer  # noqa: E402

SHAPE = MoEShape(256, 8, 3072, 256)
KEY = StudyKey(
    SHAPE, "NVIDIA H200", Provenance("", "builtin", "0.1.0", "0123456789abcdef", "3.6.0", "2.11.0", "570.86")
)
CELLS = [Cell(role, m) for m in DEFAULT_BATCH_SIZES for role in ROLES]
RECORDING = ROOT / "moeopt/recordings/data/h200-E256-top8-K3072-N256-bf16.jsonl.gz"


def measurements(count: int) -> list[Measurement]:
    configs = SearchSpace.grid(SHAPE).configs()
    return [
        Measurement(
            Job(CELLS[i % len(CELLS)], configs[(i * 37) % len(configs)]),
            "ok",
            tuple(100 + 1 / (i + j + 1) for j in range(5)),
            0.00171,
            {CELLS[i % len(CELLS)].roles[0]: Resources(128, 0, 98304, 0.8)},
            None,
            {"clock": 1980},
        )
        for i in range(count)
    ]


@contextmanager
def timed() -> Iterator[Callable[[], tuple[float, float]]]:
    wall, cpu = time.perf_counter(), time.process_time()
    end: list[tuple[float, float]] = []
    yield lambda: end[0]
    end.append((time.perf_counter() - wall, time.process_time() - cpu))


def through_the_writer(url: str, count: int) -> tuple[float, float, float]:
    """Seconds of wall and CPU per trial, and the longest that one put held the main loop up."""
    given = measurements(count)
    with StudyStore(url) as store:
        store.load(KEY, CELLS)
        writer = store.writer(KEY)
        longest = 0.0
        with timed() as cost:
            for number, measurement in enumerate(given):
                begin = time.perf_counter()
                writer.put(measurement.job.cell, measurement, "bench", number)
                longest = max(longest, time.perf_counter() - begin)
            writer.close()
    wall, cpu = cost()
    return wall / count, cpu / count, longest


def through_optuna(url: str, count: int) -> tuple[float, float]:
    """The same trials, one by one through Optuna's add_trial."""
    context = TrialContext(SHAPE)
    with StudyStore(url) as store:
        store.load(KEY, CELLS)
        studies = {cell: store.optuna_study(KEY, cell) for cell in CELLS}
        given = measurements(count)
        with timed() as cost:
            for number, m in enumerate(given):
                now = datetime.now()
                studies[m.job.cell].add_trial(frozen_trial(encode(m, "bench", number, context, now, now)))
    wall, cpu = cost()
    return wall / count, cpu / count


def workers_at_once(url: str, workers: int, jobs: int) -> dict[str, float | int]:
    """A tune and workers share jobs: seconds, and what was answered and stored."""
    recording = Recording.load(RECORDING)
    device = RecordedDevice(recording)
    cells = [Cell(role, m) for m in recording.batch_sizes for role in ROLES]
    configs = sorted(recording.rows)
    todo = [Job(cells[i % len(cells)], configs[i // len(cells)]) for i in range(jobs)]
    key = StudyKey.of(device, "split")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.worker_run", url, str(RECORDING), str(workers), "10", "30"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert process.stdout is not None
    with StudyStore(url) as store:
        store.load(key, cells)
        for _ in range(workers):
            process.stdout.readline()
        time.sleep(8)  # all have opened the database
        board = job_board(store, key)
        context = TrialContext(device.spec.shape)
        begin = time.perf_counter()
        with SharedDevice(device, board, "bench", 0, lambda cell: context, lambda job: None) as shared:
            done = Counter(m.job for m in shared.measure(todo))
        seconds = time.perf_counter() - begin
        stored = Counter(t.measurement.job for trials in store.load(key, cells).values() for t in trials)
        process.wait()
        with store.backend.begin() as connection:  # type: ignore[attr-defined]
            owners = connection.exec_driver_sql("select count(distinct owner) from moeopt_jobs").scalar()
    return {
        "workers": workers,
        "processes_that_stored": int(owners),
        "asked": jobs,
        "answered": sum(done.values()),
        "answered_distinct": len(done),
        "stored": sum(stored.values()),
        "stored_distinct": len(stored),
        "seconds": round(seconds, 2),
        "stored_per_minute": round(60 * sum(stored.values()) / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=864)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="Write the figures here, too.")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    facts = machine_facts(None)
    facts["versions"] |= {
        name: importlib.metadata.version(name) for name in ("optuna", "sqlalchemy", "psycopg", "pymysql")
    }
    facts["load"] = os.getloadavg()[0]
    costs, shared = {}, {}
    servers = {"PostgreSQL": PostgresServer(), "MariaDB": MariaServer()}
    try:
        for server in servers.values():
            server.start()
        print("| database | writer, ms a trial | CPU ms | longest put, ms | Optuna's add_trial, ms a trial | CPU ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        with tempfile.TemporaryDirectory() as directory:
            for kind in ("SQLite", "PostgreSQL", "MariaDB", "journal"):
                suffix = {"SQLite": "db", "journal": "journal"}.get(kind)
                urls = [
                    f"{directory}/{i}.{suffix}" if suffix else servers[kind].create_database(f"b{i}") for i in range(2)
                ]
                numbers = (*through_the_writer(urls[0], given.trials), *through_optuna(urls[1], given.trials // 8))
                names = ("writer_ms", "writer_cpu_ms", "longest_put_ms", "optuna_ms", "optuna_cpu_ms")
                costs[kind] = {name: round(1e3 * x, 3) for name, x in zip(names, numbers, strict=True)}
                print(f"| {kind} | " + " | ".join(f"{1e3 * x:.2f}" for x in numbers) + " |", flush=True)
        for kind, server in servers.items():
            found = shared[kind] = workers_at_once(server.create_database("w"), given.workers, given.jobs)
            print(f"{given.workers} workers and the tune on {kind}: {found}", flush=True)
    finally:
        for server in servers.values():
            server.remove()
    if given.json:
        command = f"python -m benchmarks.storage --trials {given.trials} --workers {given.workers} --jobs {given.jobs}"
        content = {
            "benchmark": "storage",
            "command": command,
            "machine": facts,
            "trials": given.trials,
            "studies": len(CELLS),
            "cost_per_trial": costs,
            "shared": shared,
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
