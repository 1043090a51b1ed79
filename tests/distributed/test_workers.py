"""Many workers on one database server: nothing timed twice, nothing lost, the dead one's claims come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeopt.core.shape import ROLES
from moeopt.core.trial import Cell, Job
from moeopt.distributed.board import job_board, share
from moeopt.distributed.claims import JobBoard, config_of, config_text
from moeopt.distributed.shared import SharedDevice
from moeopt.errors import StorageError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.storage.codec import TrialContext
from moeopt.storage.rdb import RdbBackend
from moeopt.storage.store import StudyKey, StudyStore
from moeopt.testing.suites import DeviceTestCase
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner
from tests.conftest import write_tiny_recording
from tests.storage.mariadb import MariaServer
from tests.storage.server import PostgresServer

Server = PostgresServer | MariaServer
ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "moeopt/recordings/data/h200-E256-top8-K3072-N256-bf16.jsonl.gz"


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording.load(RECORDING)


@contextmanager
def workers(url: str, count: int, *, idle_s: float = 4, lease_s: float = 30, pause_s: float = 0) -> Iterator[list[int]]:
    """Runs workers; the pids are known when all are there."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.distributed.worker_run",
            url,
            str(RECORDING),
            str(count),
            str(idle_s),
            str(lease_s),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PAUSE_S": str(pause_s)},
    )
    assert process.stdout is not None
    try:
        yield [int(process.stdout.readline()) for _ in range(count)]
        process.wait(timeout=120)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


OPTIONS = TuneOptions(batch_sizes=(64, 1024), trials=8, seed=1)


def _jobs(recording: Recording, count: int) -> list[Job]:
    configs = sorted(recording.rows)
    cells = [Cell(role, m) for m in recording.batch_sizes for role in ROLES]
    return [Job(cells[i % len(cells)], configs[i // len(cells)]) for i in range(count)]


def _measure(store: StudyStore, recording: Recording, jobs: list[Job], lease_s: float = 30) -> list[Job]:
    device = RecordedDevice(recording)
    key = StudyKey.of(device, "split")
    store.load(key, sorted({job.cell for job in jobs}))
    board = job_board(store, key, lease_s=lease_s)
    context = TrialContext(device.spec.shape)
    with SharedDevice(device, board, "run", 0, lambda cell: context, lambda job: None) as shared:
        return [m.job for m in shared.measure(jobs)]


def _stored(store: StudyStore) -> Counter[Job]:
    return Counter(
        trial.measurement.job
        for summary in store.keys()  # noqa: SIM118  (no dict)
        for trials in store.load(summary.key, list(summary.cells)).values()
        for trial in trials
    )


class TestSharedDevice(DeviceTestCase):
    repeatable = 0.0

    @pytest.fixture
    def alone(self, tmp_path: Path) -> RecordedDevice:
        return RecordedDevice(Recording.load(write_tiny_recording(tmp_path / "tiny.jsonl.gz")))

    @pytest.fixture
    def make_device(self, server_url: str, alone: RecordedDevice) -> Iterator[Callable[[], SharedDevice]]:
        with StudyStore(server_url) as store:
            key = StudyKey.of(alone, "split")
            store.load(key, [Cell(role, m) for m in (1, 16, 64) for role in ("up", "down", "joint")])
            context = TrialContext(alone.spec.shape)
            yield lambda: SharedDevice(alone, job_board(store, key), "run", 0, lambda cell: context, lambda job: None)

    @pytest.fixture
    def truth(self, alone: RecordedDevice) -> RecordedDevice:
        return alone


def test_what_another_tune_timed_is_not_reported_as_timed_here(server_url: str, recording: Recording) -> None:
    """Two tunes of one study at a time: together they report each measurement once."""
    with StudyStore(server_url) as one, StudyStore(server_url) as other:
        tuners = [Tuner(RecordedDevice(recording), store, OPTIONS, share=share) for store in (one, other)]
        with ThreadPoolExecutor(2) as pool:
            counts = [result.counts for result in pool.map(Tuner.run, tuners)]
        stored = _stored(one)
    assert sum(c.measured + c.failed + c.rejected - c.elsewhere for c in counts) <= len(stored)
    assert all(c.elsewhere <= c.measured for c in counts)
    assert sum(c.measured for c in counts) > sum(c.measured - c.elsewhere for c in counts) or counts[1].resumed


@pytest.mark.slow
def test_eight_workers_lose_and_repeat_nothing(server_url: str, recording: Recording) -> None:
    jobs = _jobs(recording, 1200)
    with StudyStore(server_url) as store, workers(server_url, 8):
        answered = _measure(store, recording, jobs)
        stored = _stored(store)
        backend = store.backend
        assert isinstance(backend, RdbBackend)
        with backend.begin() as connection:
            owners = connection.exec_driver_sql("select owner, count(*) from moeopt_jobs group by owner").all()
    assert sorted(answered) == sorted(jobs), "each is answered once"
    assert stored == Counter(jobs), "each is stored once"
    assert len(owners) >= 4, "the work is shared"


@pytest.mark.slow
def test_the_claims_of_a_killed_worker_come_back(server_url: str, recording: Recording) -> None:
    jobs = _jobs(recording, 120)
    with StudyStore(server_url) as store, workers(server_url, 2, lease_s=1.5, pause_s=0.05) as pids:
        device = RecordedDevice(recording)
        key = StudyKey.of(device, "split")
        store.load(key, sorted({job.cell for job in jobs}))
        board = job_board(store, key, lease_s=60)
        board.post(jobs, "run", 0)
        held: list[str] = []
        while not held:  # a worker has claimed something
            time.sleep(0.05)
            backend = store.backend
            assert isinstance(backend, RdbBackend)
            with backend.begin() as connection:
                query = "select distinct owner from moeopt_jobs where state = 1"
                held = [row[0] for row in connection.exec_driver_sql(query)]
        pid = int(held[0].split(":")[1])
        assert pid in pids
        os.kill(pid, signal.SIGKILL)
        answered = _measure(store, recording, jobs, lease_s=1.5)
        assert sorted(answered) == sorted(jobs)
        assert _stored(store) == Counter(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("server", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
def test_a_tune_with_workers_ends_complete(server_url: str, recording: Recording) -> None:
    with StudyStore(server_url) as store, workers(server_url, 2):
        tuner = Tuner(
            RecordedDevice(recording), store, TuneOptions(batch_sizes=(64, 1024), trials=8, seed=1), share=share
        )
        result = tuner.run()
        assert tuner.storage_error is None
        assert set(result.rows) == {64, 1024}
        stored = _stored(store)
        assert set(stored.values()) == {1}
        timed = Counter(job.cell for job in stored)
        assert max(timed.values()) <= 8
    with StudyStore(server_url) as store:
        again = Tuner(
            RecordedDevice(recording), store, TuneOptions(batch_sizes=(64, 1024), trials=8, seed=1), share=share
        ).run()
        assert again.counts.measured == 0
        assert again.rows == result.rows


def test_two_tunes_share_what_both_want(server_url: str, recording: Recording) -> None:
    jobs = _jobs(recording, 30)
    device = RecordedDevice(recording)
    key = StudyKey.of(device, "split")
    with StudyStore(server_url) as one, StudyStore(server_url) as two:
        for store in (one, two):
            store.load(key, sorted({job.cell for job in jobs}))
        first, second = job_board(one, key), job_board(two, key)
        rows = first.post(jobs[:20], "a", 0)
        assert set(second.post(jobs, "b", 0)) >= set(rows)
        claims = first.claim(16)
        assert claims
        assert {claim.job.cell for claim in claims} == {claims[0].job.cell}, "of one cell"
        taken = {claim.job for claim in claims}
        while claims := second.claim(16):
            assert not taken & {claim.job for claim in claims}
            taken |= {claim.job for claim in claims}
        assert taken == set(jobs)
        assert first.release() > 0
        assert first.claim(1), "what was given back can be claimed again"


def test_what_no_living_tune_wants_is_left(server_url: str, recording: Recording) -> None:
    device = RecordedDevice(recording)
    key = StudyKey.of(device, "split")
    with StudyStore(server_url) as store:
        jobs = _jobs(recording, 3)
        store.load(key, sorted({job.cell for job in jobs}))
        board: JobBoard = job_board(store, key, lease_s=0.2)
        rows = board.post(jobs, "run", 0)
        time.sleep(0.4)
        assert board.claim(16) == []
        board.renew(list(rows))
        assert board.claim(16)


def test_a_lost_claim_is_not_stored(server_url: str, recording: Recording) -> None:
    device = RecordedDevice(recording)
    key = StudyKey.of(device, "split")
    jobs = _jobs(recording, 1)
    with StudyStore(server_url) as store:
        store.load(key, [jobs[0].cell])
        slow, fast = job_board(store, key, lease_s=0.1), job_board(store, key)
        fast.post(jobs, "run", 0)
        (lost,) = slow.claim(16)
        time.sleep(0.3)
        (kept,) = fast.claim(16)
        measurement = next(device.measure(jobs))
        from datetime import datetime

        now = datetime.now()

        def context(cell: Cell) -> TrialContext:
            return TrialContext(device.spec.shape)

        assert slow.complete([(lost, measurement, now, now)], context) == 0
        assert fast.complete([(kept, measurement, now, now)], context) == 1
        assert _stored(store) == Counter(jobs)


def test_the_server_is_killed_and_comes_back(server: Server, server_url: str, recording: Recording) -> None:
    jobs = _jobs(recording, 60)
    device = RecordedDevice(recording)
    key = StudyKey.of(device, "split")
    with StudyStore(server_url) as store:
        store.load(key, sorted({job.cell for job in jobs}))
        writer = store.writer(key)
        measurements = list(device.measure(jobs))
        for number, measurement in enumerate(measurements[:30]):
            writer.put(measurement.job.cell, measurement, "run", number)
        writer.flush()
        server.kill()
        try:
            for number, measurement in enumerate(measurements[30:], start=30):
                writer.put(measurement.job.cell, measurement, "run", number)
            deadline = time.monotonic() + 30
            while writer.away is None and time.monotonic() < deadline:
                time.sleep(0.05)
            assert writer.away is not None
            assert "s3cret" not in writer.away
        finally:
            server.start()
        writer.close()
        assert writer.stored == 60
        assert _stored(store) == Counter(jobs)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(PostgresServer, marks=pytest.mark.postgres), pytest.param(MariaServer, marks=pytest.mark.mysql)],
)
def test_a_server_that_does_not_come_back(kind: type[Server], recording: Recording) -> None:
    own = kind()
    try:
        own.start()
        device = RecordedDevice(recording)
        key = StudyKey.of(device, "split")
        jobs = _jobs(recording, 5)
        store = StudyStore(own.create_database("gone"))
        store.load(key, sorted({job.cell for job in jobs}))
        writer = store.writer(key, give_up_s=1.0)
        own.kill()
        for number, measurement in enumerate(device.measure(jobs)):
            writer.put(measurement.job.cell, measurement, "run", number)
        with pytest.raises(StorageError, match="5 measurements could not be stored") as caught:
            writer.close()
        assert "s3cret" not in str(caught.value)
        store.close()
    finally:
        own.remove()


def test_configs_as_text(recording: Recording) -> None:
    configs = sorted(recording.rows)
    assert [config_of(config_text(config)) for config in configs] == configs


def test_a_file_takes_no_workers(tmp_path: Path, key: StudyKey) -> None:
    with StudyStore(tmp_path / "a.db") as store, pytest.raises(StorageError, match="workers need a database server"):
        job_board(store, key)
