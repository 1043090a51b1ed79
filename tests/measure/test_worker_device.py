"""The whole of a GPU device but the GPU: compiles arrive while a real worker process times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import force_setattr

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job, Reason
from moeopt.measure.monitor import GpuMonitor
from moeopt.measure.worker_device import WorkerDevice
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.testing.faults import FAULTS, REASONS, choose_faults
from moeopt.testing.suites import DeviceTestCase
from tests.measure.measure_benches import DriftingBench
from tests.measure.measure_nvml import Nvml
from tests.measure.measure_workers import make_device

DEFAULT = LaunchConfig(16, 32, 64, 1, 4, 3)


@pytest.fixture
def path(tiny_recording: Callable[..., Path]) -> Path:
    return tiny_recording()


@pytest.fixture
def make(path: Path, tmp_path: Path) -> Iterator[Callable[..., object]]:
    made = []

    def open_device(**options):
        made.append(make_device(path, tmp_path, **options))
        return made[-1]

    yield open_device
    for one in made:
        one.close()


def sound(path: Path) -> list[LaunchConfig]:
    return [config for config, row in Recording.load(path).rows.items() if row.status == "ok"]


class TestWorkerDevice(DeviceTestCase):
    repeatable = 0.01

    @pytest.fixture
    def make_device(self, make, path: Path) -> Callable[[], WorkerDevice]:
        return lambda: make(faults=dict.fromkeys(sound(path)[-1:], "crash"))

    @pytest.fixture
    def configs(self, path: Path) -> list[LaunchConfig]:
        return sound(path)[:4]

    @pytest.fixture
    def failing(self, path: Path) -> dict[LaunchConfig, Reason]:
        broken = next(c for c, row in Recording.load(path).rows.items() if row.status == "compile_error")
        illegal = LaunchConfig(256, 256, 256, 1, 4, 5)
        return {broken: "compile", illegal: "constraints", sound(path)[-1]: "runtime"}

    @pytest.fixture
    def truth(self, path: Path) -> RecordedDevice:
        return RecordedDevice(Recording.load(path))


def test_answers_are_those_of_the_recording(make, path) -> None:
    jobs = [Job(Cell(role, m), c) for role in ("up", "down") for m in (1, 16) for c in sound(path)[:5]]
    expected = {m.job: m for m in RecordedDevice(Recording.load(path)).measure(jobs)}
    found = {m.job: m for m in make().measure(jobs)}
    assert set(found) == set(jobs)
    for job, measurement in found.items():
        assert measurement.status == "ok"
        assert measurement.us == expected[job].us[: len(measurement.us)] and len(measurement.us) >= 3
        assert measurement.resources == expected[job].resources
        assert measurement.relative_error == expected[job].relative_error


def test_what_is_compiled_is_timed_while_the_rest_compiles(make, path) -> None:
    one = make(held=True)
    compiler = one._compiler
    configs = sound(path)[:4]
    results = one.measure([Job(Cell("up", 1), config) for config in configs])
    rounds = []

    def feed() -> None:
        # The control config's binary comes first, then that of the third job alone.
        compiler.release(1)
        compiler.open.insert(0, compiler.open.pop(2))
        compiler.release(1)

    import threading

    timer = threading.Timer(0.5, feed)
    timer.start()
    first = next(results)
    timer.join()
    assert first.job.config == configs[2] and first.status == "ok"
    assert len(compiler.open) == 3
    compiler.release(3)
    rounds = list(results)
    assert {m.job.config for m in rounds} == set(configs) - {configs[2]}
    assert [priority for *_, priority in compiler.asked] == [-1, 0, 0, 0, 0]


def test_failures_illegal_configs_and_rejects_are_told_apart(make, path) -> None:
    rows = Recording.load(path).rows
    broken = next(c for c, row in rows.items() if row.status == "compile_error")
    illegal = LaunchConfig(256, 256, 256, 1, 4, 5)
    one = make()
    # As if the compiler had found that this one spills.
    spilling = sound(path)[3]
    force_setattr(one._compiler.recording.rows[spilling].roles["up"], "spills", 900)
    jobs = [Job(Cell("up", 1), config) for config in (broken, illegal, spilling, sound(path)[0])]
    found = {m.job.config: m for m in one.measure(jobs)}
    assert found[broken].status == "failed" and found[broken].failure.reason == "compile"
    assert found[illegal].status == "failed" and found[illegal].failure.reason == "constraints"
    assert found[spilling].status == "rejected" and "local memory" in found[spilling].failure.message
    assert found[spilling].us == () and found[spilling].resources["up"].spills == 900
    assert found[sound(path)[0]].status == "ok"
    assert illegal not in [config for config, *_ in one._compiler.asked]
    assert one.spec.candidates([broken, illegal]) == [broken]


def test_with_a_tenth_of_the_configs_faulty_in_each_way_the_best_sound_one_is_found(make, path) -> None:
    configs = sound(path)[::3]
    kinds = [kind for kind in FAULTS if kind != "compile"]
    faults = choose_faults(configs, share=0.1, kinds=kinds, seed=3)
    one = make(faults=faults)
    cell = Cell("down", 16)
    found = list(one.measure([Job(cell, config) for config in configs]))
    assert sorted(m.job.config for m in found) == sorted(configs)
    expected = Counter(REASONS[kind] for kind in faults.values())
    assert Counter(m.failure.reason for m in found if m.failure) == expected
    assert {m.job.config for m in found if m.failure} == set(faults)
    rows = Recording.load(path).rows
    best = min((c for c in configs if c not in faults), key=lambda c: rows[c].roles["down"].us[16][2])
    assert min(found, key=lambda m: m.median_us).job.config == best
    ended = sum(kind in ("crash", "hang", "sticky_error") for kind in faults.values())
    assert sum(one.statistics().restarts.values()) == ended


def test_a_drift_of_the_control_config_has_the_batch_timed_again_once(make, path, caplog) -> None:
    bench = DriftingBench(path, factors=(1.0, 1.1, 1.1, 1.1), control=DEFAULT)
    one = make(bench=bench)
    configs = [c for c in sound(path) if c != DEFAULT][:4]
    found = list(one.measure([Job(Cell("up", 1), config) for config in configs]))
    assert sorted(m.job.config for m in found) == sorted(configs)
    assert all("drifted by 10.0 %" in m.extra["timed_again"] and "disturbed" not in m.extra for m in found)
    stats = one.statistics()
    assert stats.timed_again == 4 and stats.timed == 8 and stats.drifts == (pytest.approx(0.1, abs=1e-3),)
    assert "control config drifted" in caplog.text


def test_a_batch_that_never_settles_is_marked(make, path) -> None:
    bench = DriftingBench(path, factors=(1.0, 1.1, 1.3, 1.6), control=DEFAULT)
    (found,) = make(bench=bench).measure([Job(Cell("up", 1), sound(path)[9])])
    assert "drifted" in found.extra["disturbed"] and found.status == "ok"


def test_hints_are_compiled_for_both_roles_behind_everything_else(make, path) -> None:
    one = make(held=True)
    configs = sound(path)[:3]
    one.prefetch([*configs, LaunchConfig(256, 256, 256, 1, 4, 5)])
    asked = one._compiler.asked
    assert [(config, role) for config, role, *_ in asked] == [(c, r) for c in configs for r in ("up", "down")]
    priorities = [priority for *_, priority in asked]
    assert priorities == sorted(priorities) and priorities[0] > 0


def test_an_iterator_that_is_closed_drops_the_rest_and_the_device_goes_on(make, path) -> None:
    one = make(held=True)
    results = one.measure([Job(Cell("up", 1), config) for config in sound(path)[:5]])
    one._compiler.held = False
    import threading

    threading.Timer(0.3, one._compiler.release, args=(2,)).start()
    next(results)
    results.close()
    assert all(future.cancelled() for future, _ in one._compiler.open)
    (again,) = one.measure([Job(Cell("down", 1), sound(path)[7])])
    assert again.status == "ok"


def test_control_time_and_statistics(make, path) -> None:
    one = make()
    recorded = Recording.load(path).rows[DEFAULT].roles["up"].us[1]
    assert one.control_us() == pytest.approx(recorded[1], rel=0.01)
    stats = one.statistics()
    assert stats.worker_starts == 1 and stats.compiled_in_worker == 0 and stats.control_s > 0
    assert stats.to_dict()["gpu_s"] > 0


def test_others_on_the_gpu_are_named_once_and_its_state_is_kept(make, path, caplog) -> None:
    nvml = Nvml()
    nvml.processes = {4_190_001: 75 * 2**30}
    one = make(monitor=GpuMonitor(nvml, object()))
    for config in sound(path)[:2]:
        (found,) = one.measure([Job(Cell("up", 1), config)])
        assert found.extra["clock_mhz"] == 1980 and "disturbed" not in found.extra
    (said,) = [r.getMessage() for r in caplog.records if "not alone" in r.getMessage()]
    assert "server (pid 4190001) with 75.0 GiB" in said and "--wait-idle" in said
    stats = one.statistics()
    assert stats.others == ("server (pid 4190001) with 75.0 GiB",)
    assert stats.state_start == stats.state_end == {"clock_mhz": 1980, "temperature_c": 41, "power_w": 312.3}
    nvml.use = {4_190_001: 40}
    one._polled = 0.0
    (found,) = one.measure([Job(Cell("down", 1), sound(path)[2])])
    assert found.extra["disturbed"] == "server (pid 4190001) with 75.0 GiB used the GPU (40 % of the time)"


def test_closing_ends_the_worker_and_the_compiler(make, path) -> None:
    one = make()
    list(one.measure([Job(Cell("up", 1), sound(path)[0])]))
    pid = one._supervisor.pid
    one.close()
    one.close()
    assert one._compiler.closed and not psutil.pid_exists(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_parent_leaves_no_worker(path: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Also in the middle of a launch that never ends."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            sys.path[:0] = {[str(Path(__file__).parents[2])]!r}
            from pathlib import Path
            from moeopt.core.trial import Cell, Job, never_stop
            from moeopt.testing.faults import FaultyBench
            from moeopt.measure.supervisor import Deadlines, Supervisor
            from moeopt.measure.compile_queue import ReadyJob
            from moeopt.recordings.format import Recording
            path = Path({str(path)!r})
            config = next(c for c, row in Recording.load(path).rows.items() if row.status == "ok")
            supervisor = Supervisor(FaultyBench(path, {{config: "hang"}}), Path({str(tmp_path / "w.log")!r}),
                                    deadlines=Deadlines(first_check=600))
            supervisor.facts()
            print(supervisor.pid, flush=True)
            jobs = [ReadyJob(Job(Cell("up", 1), config))]
            list(supervisor.run(lambda: jobs.pop() if jobs else None, never_stop))
        """)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    assert worker.is_running()
    time.sleep(0.5)
    os.kill(parent.pid, how)
    parent.wait(10)
    psutil.wait_procs([worker], timeout=3)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
