"""The pool against compilers that fail in every way; the real compiler is in test_real.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from moeopt.compile import CompilePool, pool
from moeopt.core.shape import MoEShape
from moeopt.errors import DeviceError, InvalidInputError
from tests.compile.faulty import FAULTS, FaultyKernel, OneProcessKernel, config

SHAPE = MoEShape(8, 2, 256, 128)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Makes pools whose deadline is a second once there is a median."""
    monkeypatch.setattr(pool, "DEADLINE_FLOOR_S", 1.0)
    monkeypatch.setattr(pool, "_FIRST_DEADLINE_S", 2.0)
    pools = []

    def build(workers: int = 2, seconds: float = 0.0, shape: MoEShape = SHAPE) -> CompilePool:
        (tmp_path / "scratch").mkdir(exist_ok=True)
        kernel = FaultyKernel(tmp_path / "scratch", seconds)
        made = CompilePool(kernel, shape, (12, 0), workers=workers, cache_dir=tmp_path / "cache")
        pools.append(made)
        return made

    yield build
    for made in pools:
        made.close()


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "scratch" / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_resources_come_back(make) -> None:
    compiled = make().submit(config(), "up", 64).result(60)
    assert compiled.failure is None
    assert (compiled.resources.registers, compiled.resources.shared_bytes) == (32, 1024)
    assert (compiled.config, compiled.role, compiled.specialisation) == (config(), "up", "many")


def test_each_distinct_binary_is_compiled_once(make, tmp_path: Path) -> None:
    it = make()
    first = it.submit(config(), "up", 64)
    assert it.submit(config(), "up", 128) is first
    others = [it.submit(config(), "up", 1), it.submit(config(), "down", 64), it.submit(config(number=1), "up", 64)]
    assert all(f.result(60).failure is None for f in [first, *others])
    assert len(calls(tmp_path)) == 4
    assert it.counts.asked == it.counts.compiled == 4


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("abort", "compile", ("died", "SIGABRT", "LLVM ERROR: unsupported layout")),
        ("segfault", "compile", ("died", "SIGSEGV")),
        ("hang", "timeout", ("took over",)),
        ("hang_in_child", "timeout", ("took over",)),
        ("raise", "compile", ("PassManager::run failed", "error: no layout fits")),
        ("exit", "compile", ("SystemExit",)),
        ("oom", "compile", ("killed", "memory")),
        ("unpicklable", "compile", ()),
        ("disk_full", "runtime", ("No space left",)),
    ],
)
def test_a_fault_costs_one_line_and_nothing_else(make, fault: str, reason: str, words: tuple[str, ...]) -> None:
    it = make(seconds=0.01)
    sound = [it.submit(config(number=n), "up", 64) for n in range(6)]
    bad = it.submit(config(fault), "up", 64)
    sound += [it.submit(config(number=n), "up", 64) for n in range(6, 12)]
    assert all(f.result(60).failure is None for f in sound)
    failure = bad.result(60).failure
    assert failure.reason == reason
    assert "\n" not in failure.message
    assert 0 < len(failure.message) < 400
    for word in words:
        assert word in failure.message
    assert (it.counts.compiled, it.counts.failed) == (12, 1)


def test_all_faults_at_once(make) -> None:
    it = make(workers=3, seconds=0.02)
    bad = {fault: it.submit(config(fault), "down", 64) for fault in FAULTS}
    sound = [it.submit(config(number=n), "down", 64) for n in range(1, 40)]
    assert all(f.result(120).failure is None for f in sound)
    failed = {fault for fault, future in bad.items() if future.result(120).failure}
    assert failed == set(FAULTS) - {"print", "oom_once"}


def test_a_process_killed_once_from_outside_is_forgiven(make) -> None:
    assert make().submit(config("oom_once"), "up", 64).result(60).failure is None


def test_the_output_is_kept_in_the_named_log_and_nowhere_else(make, tmp_path: Path, capfd) -> None:
    it = make()
    failure = it.submit(config("raise"), "up", 64).result(60).failure
    assert it.submit(config("print"), "up", 64).result(60).failure is None
    text = Path(failure.log).read_text()
    assert text.count("tt.func public @kernel") == 100
    assert "no layout fits" in text
    assert str(config("raise")) in text
    it.close()
    assert list(it.log_dir.glob("*.log")) == [Path(failure.log)]
    out, err = capfd.readouterr()
    assert "tt.func" not in out + err
    assert "PTX" not in out + err


def test_the_children_of_a_hung_compiler_end_with_it(make, tmp_path: Path) -> None:
    failure = make().submit(config("hang_in_child"), "up", 64).result(60).failure
    assert failure.reason == "timeout"
    _gone(int((tmp_path / "scratch" / "child").read_text()))


def test_the_deadline_follows_the_median(make) -> None:
    it = make()
    assert it.deadline_s == 2.0
    it.counts.seconds.extend([0.5] * 5)
    assert it.deadline_s == pool.DEADLINE_FACTOR * 0.5
    it.counts.seconds.extend([0.01] * 50)
    assert it.deadline_s == 1.0


def test_the_deadline_does_not_run_in_the_queue(make) -> None:
    it = make(workers=1, seconds=0.6)
    futures = [it.submit(config(number=n), "up", 64) for n in range(6)]
    assert all(f.result(60).failure is None for f in futures)


def test_failures_are_remembered_by_the_next_pool(make, tmp_path: Path) -> None:
    first = make()
    before = {fault: first.submit(config(fault), "up", 64).result(60).failure for fault in ("abort", "raise")}
    first.submit(config("oom"), "up", 64).result(60)
    first.close()
    tried = len(calls(tmp_path))
    second = make()
    for fault, failure in before.items():
        compiled = second.submit(config(fault), "up", 64).result(0)
        assert compiled.remembered
        assert compiled.failure == failure
    assert len(calls(tmp_path)) == tried
    assert second.counts.remembered == 2
    # What ran out of memory or disk may fit next time; another shape or binary is another matter.
    assert not second.submit(config("oom"), "up", 64).result(60).remembered
    assert not second.submit(config("disk_full"), "up", 64).result(60).remembered
    assert not second.submit(config("raise"), "up", 1).result(60).remembered
    assert not make(shape=SHAPE.replace(hidden_size=512)).submit(config("raise"), "up", 64).result(60).remembered


def test_what_ran_out_of_time_is_tried_in_one_more_run(make, tmp_path: Path) -> None:
    """The machine may have been busy; a config that never ends costs two deadlines in all."""
    for remembered in (False, False, True):
        it = make()
        compiled = it.submit(config("hang"), "up", 64).result(60)
        assert compiled.failure.reason == "timeout" and compiled.remembered is remembered
        it.close()
    assert len(calls(tmp_path)) == 2


def test_a_torn_memo_is_read_as_far_as_it_goes(make) -> None:
    first = make()
    first.submit(config("raise"), "up", 64).result(60)
    first.close()
    (memo,) = (first.cache_dir / "moeopt").glob("failed-*.jsonl")
    memo.write_bytes(b"\xff\xfe\n" + memo.read_bytes() + b'{"key": "torn')
    assert make().submit(config("raise"), "up", 64).result(60).remembered


def test_urgent_ones_go_first(make, tmp_path: Path) -> None:
    it = make(workers=1, seconds=0.2)
    hinted = [it.submit(config(number=n), "up", 64, priority=1) for n in range(5)]
    while not calls(tmp_path):
        time.sleep(0.01)
    urgent = it.submit(config(number=9), "up", 64)
    moved = it.submit(config(number=4), "up", 64, priority=0)
    assert moved is hinted[4]
    assert all(f.result(60).failure is None for f in [*hinted, urgent])
    numbers = [int(line.split(" r")[1].split()[0]) if " r" in line else 0 for line in calls(tmp_path)]
    assert numbers == [0, 9, 4, 1, 2, 3]


def test_what_has_not_begun_can_be_dropped(make, tmp_path: Path) -> None:
    it = make(workers=1, seconds=0.3)
    futures = [it.submit(config(number=n), "up", 64) for n in range(10)]
    while not calls(tmp_path):
        time.sleep(0.01)
    assert sum(future.cancel() for future in futures) >= 8
    assert futures[0].result(60).failure is None
    with pytest.raises(CancelledError):
        futures[9].result(60)
    assert it.submit(config(number=9), "up", 64).result(60).failure is None


def test_close_ends_all_processes_even_hung_ones(make, tmp_path: Path) -> None:
    it = make(workers=2)
    hung = it.submit(config("hang"), "up", 64)
    queued = [it.submit(config("hang", number=n), "up", 64) for n in range(1, 4)]
    while len(calls(tmp_path)) < 2:
        time.sleep(0.01)
    pids = {int(line.split()[0]) for line in calls(tmp_path)}
    it.close()
    for pid in pids:
        _gone(pid)
    for future in [hung, *queued]:
        with pytest.raises(CancelledError):
            future.result(0)
    assert not list(it.log_dir.iterdir())
    with pytest.raises(DeviceError, match="closed"):
        it.submit(config(), "up", 64)
    it.close()


def test_workers_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        from pathlib import Path
        from moeopt.compile import CompilePool
        from moeopt.core.shape import MoEShape
        from tests.compile.faulty import FaultyKernel, config
        pool = CompilePool(FaultyKernel(Path({str(tmp_path)!r})), MoEShape(8, 2, 256, 128), (12, 0), workers=2,
                           cache_dir={str(tmp_path)!r})
        [pool.submit(config(fault), "up", 64) for fault in ("hang", "hang_in_child")]
        input()
        """
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, cwd=root)
    limit = time.monotonic() + 60
    while not (tmp_path / "child").exists() or len((tmp_path / "calls").read_text().splitlines()) < 2:
        assert time.monotonic() < limit
        time.sleep(0.05)
    pids = {int(line.split()[0]) for line in (tmp_path / "calls").read_text().splitlines()}
    pids.add(int((tmp_path / "child").read_text()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    for pid in pids:
        _gone(pid)


def test_a_kernel_that_cannot_be_loaded_is_one_error_not_a_hang(tmp_path: Path) -> None:
    class Local(FaultyKernel):
        """Not importable in another process, and not picklable because of its lock."""

        def __reduce__(self):
            import operator

            return operator.attrgetter("missing"), (operator,)

    it = CompilePool(Local(tmp_path), SHAPE, (12, 0), workers=1, cache_dir=tmp_path)
    with it, pytest.raises(DeviceError, match="no compile process can be started"):
        it.submit(config(), "up", 64).result(60)


def test_a_process_that_cannot_be_started_leaves_the_work_to_the_others(tmp_path: Path) -> None:
    with CompilePool(OneProcessKernel(tmp_path, 0.5), SHAPE, (12, 0), workers=2, cache_dir=tmp_path) as it:
        it.start()
        futures = [it.submit(config(number=n), "up", 64) for n in range(40)]
        assert all(f.result(120).failure is None for f in futures)
        assert [slot.retired for slot in it._slots].count(True) == 1


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    it = CompilePool(FaultyKernel(tmp_path), SHAPE, (12, 0), workers=1, cache_dir=file)
    with it, pytest.raises(DeviceError, match="TRITON_CACHE_DIR"):
        it.submit(config(), "up", 64)


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_is_refused(tmp_path: Path, workers: int) -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        CompilePool(FaultyKernel(tmp_path), SHAPE, (12, 0), workers=workers, cache_dir=tmp_path)


def _gone(pid: int) -> None:
    """Waits until a process is no more; fails after 10 s."""
    limit = time.monotonic() + 10
    while psutil.pid_exists(pid):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        assert time.monotonic() < limit, f"process {pid} is still there"
        time.sleep(0.05)
