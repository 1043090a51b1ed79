"""A worker process is kept alive whatever the configs do to it. The processes are real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.errors import DeviceError
from moeopt.measure.compile_queue import ReadyJob
from moeopt.measure.supervisor import Deadlines, Supervisor
from moeopt.recordings.format import Recording
from moeopt.testing.faults import Fault, FaultyBench
from tests.measure.measure_benches import (
    DiesOverOperandsBench,
    LongLaunchBench,
    StillbornBench,
    prepared,
    unanswerable,
)
from tests.measure.measure_workers import QUICK

CELL = Cell("up", 16)


@pytest.fixture
def recording(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


@pytest.fixture
def configs(recording: Recording) -> list[LaunchConfig]:
    return [config for config, row in recording.rows.items() if row.status == "ok"]


@pytest.fixture
def supervise(recording: Recording, tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    made = []

    def make(faults: dict[LaunchConfig, Fault] | None = None, *, bench: FaultyBench | None = None) -> Supervisor:
        bench = bench or FaultyBench(recording.path, faults or {})
        made.append(Supervisor(bench, tmp_path / f"gpu{len(made)}.log", deadlines=QUICK))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.close()


def begin(supervisor: Supervisor, configs: Sequence[LaunchConfig], race: Race | None = never_stop, cell: Cell = CELL):
    jobs = [ReadyJob(Job(cell, config)) for config in configs]
    return supervisor.run(lambda: jobs.pop(0) if jobs else None, race)


def work(supervisor: Supervisor, configs: Sequence[LaunchConfig], race: Race | None = never_stop) -> list[Measurement]:
    return list(begin(supervisor, configs, race))


def test_sound_configs_get_the_recorded_times(supervise, recording, configs) -> None:
    outcomes = work(supervise(), configs[:6])
    for config, outcome in zip(configs, outcomes, strict=False):
        recorded = recording.rows[config].roles["up"].us[16]
        assert outcome.job.config == config
        assert outcome.failure is None and outcome.status == "ok"
        assert outcome.us == recorded[: len(outcome.us)]
        assert 3 <= len(outcome.us) <= 5
        assert outcome.relative_error == pytest.approx(0.0017)


def test_the_race_is_asked_in_this_thread_and_can_end_after_the_first_round(supervise, configs) -> None:
    asked = []

    def race(job: Job, rounds: Sequence[float]) -> bool:
        asked.append((job.config, len(rounds)))
        return job.config == configs[1]

    first, second, third = work(supervise(), configs[:3], race)
    assert second.status == "raced_out" and len(second.us) == 1
    assert first.status == third.status == "ok" and len(third.us) >= 3
    assert asked[: len(first.us)] == [(configs[0], n + 1) for n in range(len(first.us))]


def test_without_a_race_a_job_is_timed_in_full(supervise, configs) -> None:
    (outcome,) = work(supervise(), configs[:1], None)
    assert outcome.status == "ok" and outcome.failure is None and len(outcome.us) >= 3


@pytest.mark.parametrize(
    ("fault", "reason", "restart"),
    [
        ("crash", "runtime", "crash"),
        ("hang", "timeout", "hang"),
        ("sticky_error", "runtime", "sticky"),
        ("wrong_result", "correctness", None),
        ("nan", "correctness", None),
        ("memory", "runtime", None),
    ],
)
def test_each_fault_costs_its_config_and_no_other(supervise, configs, fault, reason, restart) -> None:
    supervisor = supervise({configs[2]: fault})
    outcomes = work(supervisor, configs[:5])
    assert [o.job.config for o in outcomes] == configs[:5]
    assert [o.failure.reason if o.failure else None for o in outcomes] == [None, None, reason, None, None]
    assert "\n" not in outcomes[2].failure.message
    assert dict(supervisor.counts.restarts) == ({restart: 1} if restart else {})
    assert supervisor.counts.starts == (2 if restart else 1)
    if restart:
        assert Path(outcomes[2].failure.log).exists()


def test_a_config_that_ended_the_worker_twice_is_not_launched_again(supervise, configs) -> None:
    supervisor = supervise({configs[0]: "crash"})
    outcomes = work(supervisor, [configs[0]] * 4 + [configs[1]])
    assert [o.failure.reason if o.failure else None for o in outcomes] == ["runtime"] * 4 + [None]
    assert supervisor.counts.restarts["crash"] == 2
    assert "not launched" in outcomes[3].failure.message


def test_a_worker_that_is_killed_from_outside_is_no_fault_of_the_config(supervise, configs, recording) -> None:
    supervisor = supervise(bench=FaultyBench(recording.path, round_s=0.05))
    killed = []

    def race(job: Job, rounds: Sequence[float]) -> bool:
        if job.config == configs[1] and not killed:
            killed.append(supervisor.pid)
            os.kill(supervisor.pid, signal.SIGKILL)
        return False

    outcomes = work(supervisor, configs[:3], race)
    assert killed and [o.failure for o in outcomes] == [None] * 3
    assert dict(supervisor.counts.restarts) == {"killed": 1}


def test_a_run_that_is_dropped_leaves_a_worker_that_goes_on(supervise, configs) -> None:
    supervisor = supervise()
    supervisor.facts()
    pid = supervisor.pid
    run = begin(supervisor, configs[:6])
    next(run)
    run.close()
    (outcome,) = work(supervisor, configs[7:8])
    assert outcome.job.config == configs[7] and outcome.failure is None
    assert supervisor.pid == pid


def test_an_error_in_the_race_comes_through_and_the_next_run_starts_afresh(supervise, configs) -> None:
    supervisor = supervise()

    def race(job: Job, rounds: Sequence[float]) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(supervisor, configs[:2], race)
    assert work(supervisor, configs[:1])[0].failure is None


def test_a_refusal_is_a_device_error_with_its_own_words(supervise, recording) -> None:
    supervisor = supervise(bench=FaultyBench(recording.path, refusal="NVIDIA H200 has 1.0 GiB free and 2.0 are needed"))
    with pytest.raises(DeviceError, match=r"^NVIDIA H200 has 1.0 GiB free and 2.0 are needed$"):
        supervisor.facts()


def test_a_worker_that_dies_at_its_start_is_given_up(supervise, recording) -> None:
    supervisor = supervise(bench=StillbornBench(recording.path))
    with pytest.raises(DeviceError, match="SIGABRT at its start, 3 times"):
        supervisor.facts()


def test_a_death_before_the_launch_is_not_blamed_on_the_config(supervise, recording, configs) -> None:
    supervisor = supervise(bench=DiesOverOperandsBench(recording.path))
    with pytest.raises(DeviceError, match=r"before .* of up M=64 was launched, 3 times"):
        list(begin(supervisor, configs[:1], cell=Cell("up", 64)))


def test_cells_are_prepared_while_nobody_asks(supervise) -> None:
    supervisor = supervise()
    cells = [Cell("up", m) for m in (1, 16, 64)]
    supervisor.prepare(cells)
    supervisor.start()
    deadline = time.monotonic() + 20
    while supervisor.ask(prepared) != cells:
        assert time.monotonic() < deadline
    with pytest.raises(DeviceError, match="could not answer 'unanswerable': ValueError: 42"):
        supervisor.ask(unanswerable)


def test_closing_leaves_no_process_and_no_log_that_nobody_was_told_of(supervise, configs) -> None:
    supervisor = supervise()
    work(supervisor, configs[:1])
    pid, log = supervisor.pid, supervisor.log_path
    supervisor.close()
    supervisor.close()
    assert not psutil.pid_exists(pid) and not log.exists()
    with pytest.raises(DeviceError, match="closed"):
        supervisor.start()


def test_a_slow_kernel_gets_the_time_it_said_it_needs(supervise, recording, configs) -> None:
    # A round takes longer than the least deadline, and shorter than what its check promised.
    bench = LongLaunchBench(recording.path, round_s=2.0 * QUICK.floor)
    supervisor = supervise(bench=bench)
    assert work(supervisor, configs[:1])[0].failure is None
    supervisor = supervise(bench=FaultyBench(recording.path, round_s=2.0 * QUICK.floor))
    assert work(supervisor, configs[:1])[0].failure.reason == "timeout"


def test_deadlines_of_a_checked_launch_come_down_once_some_were_seen(supervise, recording, configs) -> None:
    supervisor = supervise()
    supervisor.deadlines = Deadlines(first_check=30.0, floor=1.5)
    assert supervisor._check_limit() == 30.0
    work(supervisor, configs[:8])
    assert supervisor._check_limit() == 1.5
