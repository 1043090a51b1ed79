"""What every executor must do: one suite over the GPUs of a machine and over a Ray cluster of two nodes."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import psutil
import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import DeviceError
from moeopt.measure.base import Device
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner

from .executors import Executor, LocalExecutor, RayExecutor
from .gpus import CONTROL, RecordedKernel, Replayed, Worked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(params=["local", "ray"])
def executor(request: pytest.FixtureRequest) -> Executor:
    cluster: RayExecutor
    if request.param == "ray":
        cluster = request.getfixturevalue("cluster")
        return cluster
    return LocalExecutor()


@pytest.fixture
def gpus(recording: Recording, tmp_path: Path) -> Replayed:
    return Replayed(recording, tmp_path)


def _sound(recording: Recording, count: int) -> list[LaunchConfig]:
    """Configs that can be timed, but for the control config."""
    rows = sorted(recording.rows.items())
    return [config for config, row in rows if row.status == "ok" and config != CONTROL][:count]


def _jobs(configs: Sequence[LaunchConfig]) -> list[Job]:
    return [Job(Cell(role, m), c) for c in configs for m in (1, 16, 64) for role in ROLES]


def _plain(found: Iterator[Measurement] | Sequence[Measurement]) -> dict[Job, Measurement]:
    """By job, without what is said of the GPU."""
    return {m.job: replace(m, extra={}) for m in found}


def _expected(recording: Recording, jobs: Sequence[Job]) -> dict[Job, Measurement]:
    return _plain(RecordedDevice(recording).measure(jobs))


def test_it_is_the_device_that_each_gpu_is(executor: Executor, gpus: Replayed, recording: Recording) -> None:
    alone = RecordedDevice(recording).spec
    configs = sorted(recording.rows)
    with executor.open(gpus) as device:
        spec = device.spec
        assert (spec.shape, spec.gpu, spec.batch_sizes) == (alone.shape, alone.gpu, alone.batch_sizes)
        assert replace(spec.provenance, source="") == replace(alone.provenance, source="")
        assert spec.candidates(configs) == alone.candidates(configs)
        assert spec.space_extras == alone.space_extras
        for cell in (Cell("up", 16), Cell("joint", 64)):
            assert spec.roofline_us(cell) == alone.roofline_us(cell)
        assert spec.default_config("down", 64) == alone.default_config("down", 64)
        device.prefetch(configs[:3])
        assert list(device.measure([])) == []


def test_every_job_is_answered_once_as_by_one_gpu(executor: Executor, gpus: Replayed, recording: Recording) -> None:
    """Failures, too; all configs of a batch size are timed on one GPU, and both GPUs have something to do."""
    jobs = [*_jobs(sorted(recording.rows)[:40]), Job(Cell("joint", 16), _sound(recording, 1)[0])]
    with executor.open(gpus) as device:
        found = list(device.measure(jobs))
        again = list(device.measure(jobs[:12]))
    assert Counter(m.job for m in found) == Counter(jobs)
    assert _plain(found) == _expected(recording, jobs)
    owners = defaultdict(set)
    for m in [*found, *again]:
        owners[m.job.cell.batch_size].add(m.extra["gpu"])
    assert all(len(numbers) == 1 for numbers in owners.values())
    assert {number for numbers in owners.values() for number in numbers} == {0, 1}


def test_the_race_is_run_where_the_rounds_are_timed(executor: Executor, gpus: Replayed, recording: Recording) -> None:
    """It is asked in the calling thread after each round, and a loser costs the rounds that it lost in."""
    jobs = _jobs(_sound(recording, 8))
    threads = set()

    def race(job: Job, rounds: Sequence[float]) -> bool:
        threads.add(threading.get_ident())
        return len(rounds) == 2 and job.cell.role == "down"

    with executor.open(gpus) as device:
        found = list(device.measure(jobs, race))
    assert threads == {threading.get_ident()}
    assert _plain(found) == _plain(RecordedDevice(recording).measure(jobs, race))
    timed = Counter(line.split(" ", 1)[1] for line in gpus.rounds())
    for job in jobs:
        line = f"{job.cell.role} {job.cell.batch_size} {job.config}"
        assert timed[line] == (2 if job.cell.role == "down" else 5)


OURS = TuneOptions(batch_sizes=(1, 16), trials=12, seed=2)
OPTUNA = TuneOptions(
    batch_sizes=(1, 16), trials=10, seed=3, sampler=optuna.samplers.TPESampler(n_startup_trials=3),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("executor", "options"),
    [
        pytest.param("local", OURS, id="local-ours"),
        pytest.param("local", OPTUNA, id="local-optuna"),
        pytest.param("ray", OURS, id="ray-ours"),
    ],
    indirect=["executor"],
)
def test_a_tune_ends_as_on_one_gpu(
    executor: Executor, gpus: Replayed, recording: Recording, tmp_path: Path, options: TuneOptions
) -> None:
    with StudyStore(tmp_path / "one.db") as store:
        expected = Tuner(RecordedDevice(recording), store, options).run()
    with executor.open(gpus) as device, StudyStore(tmp_path / "two.db") as store:
        found = Tuner(device, store, options).run()
    with StudyStore(tmp_path / "two.db") as store:
        again = Tuner(RecordedDevice(recording), store, options).run()
    if options.sampler is None:
        assert found.rows == expected.rows
    assert set(found.rows) == set(expected.rows)
    assert again.rows == found.rows
    assert again.counts.measured == 0, "what two GPUs timed is not timed again by one"


def test_an_iterator_that_is_closed_ends_the_measuring(
    executor: Executor, recording: Recording, tmp_path: Path
) -> None:
    gpus = Replayed(recording, tmp_path, pause_s=0.02)
    jobs = _jobs(_sound(recording, 20))
    with executor.open(gpus) as device:
        begun = device.measure(jobs)
        next(begun)
        begun.close()  # type: ignore[attr-defined]
        assert _plain(device.measure(jobs[:6])) == _expected(recording, jobs[:6])
    assert len(gpus.rounds()) < 5 * len(jobs), "not all of the first batch was timed"


def test_an_error_of_one_gpu_is_raised_here(executor: Executor, recording: Recording, tmp_path: Path) -> None:
    with (
        executor.open(Replayed(recording, tmp_path, refuse=1)) as device,
        pytest.raises(DeviceError, match="the driver is gone"),
    ):
        list(device.measure(_jobs(_sound(recording, 4))))


DISAGREE = r"disagree by 4\.5 %.*(100\.0|104\.5) µs.*(100\.0|104\.5) µs"


@pytest.mark.parametrize(
    ("executor", "control", "message"),
    [
        pytest.param("local", (100.0, 104.5), DISAGREE, id="local-disagree"),
        pytest.param("local", (100.0, None), "nothing shows that the GPUs agree", id="local-unknown"),
        pytest.param("ray", (100.0, 104.5), DISAGREE, id="ray-disagree"),
    ],
    indirect=["executor"],
)
def test_gpus_that_do_not_agree_are_not_mixed(
    executor: Executor, recording: Recording, tmp_path: Path, control: tuple[float | None, ...], message: str
) -> None:
    gpus = Replayed(recording, tmp_path, control=control)
    with executor.open(gpus) as device, pytest.raises(DeviceError, match=message):
        list(device.measure(_jobs(_sound(recording, 2))))
    assert gpus.rounds() == []


def test_gpus_of_two_kinds_are_refused(executor: Executor, recording: Recording, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="NVIDIA B200"):
        executor.open(Replayed(recording, tmp_path, other=1))


@pytest.fixture
def worked(executor: Executor, path: Path, tmp_path: Path) -> Worked:
    return Worked(RecordedKernel(path, tmp_path), executor.compiler(tmp_path / "cache"))


def _measured(device: Device, jobs: Sequence[Job]) -> dict[Job, Measurement]:
    found = list(device.measure(jobs))
    assert Counter(m.job for m in found) == Counter(jobs)
    return _plain(found)


def _alike(found: dict[Job, Measurement], recording: Recording) -> None:
    """A worker times until it is sure, so fewer rounds than were recorded."""
    for job, expected in _expected(recording, list(found)).items():
        m = found[job]
        assert (m.status, m.us) == (expected.status, expected.us[: len(m.us)])
        assert m.resources == {
            role: replace(r, compile_s=m.resources[role].compile_s) for role, r in expected.resources.items()
        }
        assert len(m.us) >= 3


def test_each_binary_is_compiled_once_for_all_gpus_and_closing_ends_the_processes(
    executor: Executor, worked: Worked, recording: Recording, tmp_path: Path
) -> None:
    jobs = _jobs(_sound(recording, 3))
    with executor.open(worked) as device:
        device.prefetch([job.config for job in jobs[:6]])
        _alike(_measured(device, jobs), recording)
        pids = [int((tmp_path / f"worker{number}").read_text()) for number in (0, 1)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        device.close()
        device.close()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    compiles = Counter(worked.compiles())
    assert set(compiles.values()) == {1}
    assert set(compiles) >= {f"{job.cell.role} {job.config}" for job in jobs}


def test_what_fails_costs_one_trial(executor: Executor, worked: Worked, recording: Recording) -> None:
    """A compiler that aborts or says no, a launch that crashes, hangs or lies: each a reason, and the rest goes on."""
    sound = _sound(recording, 7)
    broken = next(config for config, row in recording.rows.items() if row.status == "compile_error")
    kernel = replace(worked.kernel, aborts=frozenset(sound[:1]))
    faults = {sound[1]: "crash", sound[2]: "hang", sound[3]: "wrong_result", sound[4]: "memory"}
    cells = [Cell("up", 1), Cell("down", 64)]
    jobs = [Job(cell, config) for config in [*sound, broken] for cell in cells]
    with executor.open(replace(worked, kernel=kernel, faults=faults)) as device:
        found = _measured(device, jobs)
    reasons = {
        sound[0]: "compile",
        sound[1]: "runtime",
        sound[2]: "timeout",
        sound[3]: "correctness",
        sound[4]: "runtime",
        broken: "compile",
    }
    for m in found.values():
        assert (m.failure.reason if m.failure else None) == reasons.get(m.job.config), m
    aborted = found[Job(cells[0], sound[0])].failure
    assert aborted is not None
    assert "LLVM ERROR: unsupported layout" in aborted.message
    _alike({job: m for job, m in found.items() if job.config not in reasons}, recording)


def test_what_is_killed_in_the_middle_costs_nothing(
    executor: Executor, worked: Worked, recording: Recording, tmp_path: Path
) -> None:
    """A GPU's worker on one machine, a whole node of the cluster with its GPU's actor and compiles."""
    kernel = replace(worked.kernel, compile_s=0.05)
    jobs = _jobs(_sound(recording, 12))
    with executor.open(replace(worked, kernel=kernel, round_s=0.01)) as device:
        found: list[Measurement] = []
        for m in device.measure(jobs):
            found.append(m)
            if len(found) == 10:
                while not (tmp_path / "worker1").exists():
                    time.sleep(0.01)
                executor.kill(device, tmp_path)
        assert Counter(m.job for m in found) == Counter(jobs), "each is answered once"
        _alike(_plain(found), recording)
        _alike(_measured(device, jobs[:6]), recording)
