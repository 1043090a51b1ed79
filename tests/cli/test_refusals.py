"""What a command refuses: one line on stderr, exit status 2, and nothing written."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import moeopt
from moeopt.core.provenance import Provenance
from moeopt.errors import InvalidInputError
from moeopt.export.write import MARKER
from moeopt.kernels.routing import Routing
from moeopt.measure.options import DeviceOptions
from tests.cli.conftest import Run

Write = Callable[..., Path]
SHAPE = ["--experts", "8", "--top-k", "2", "--hidden", "256", "--intermediate", "128"]
TUNE = ["tune", "--gpu", "recorded:tiny.jsonl.gz", "--trials", "2", "--batch-sizes", "16"]
MADE: list[bytes] = []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tune", "--trials", "x"], "Invalid value for '--trials'"),
        (["tune", "--no-such-option"], "No such option: --no-such-option: see moeopt tune --help"),
        (["tune", "a", "b"], "unexpected extra argument"),
        (["no-such-command"], "No such command 'no-such-command'"),
        ([*TUNE, "--json", "."], "it is a directory"),
        ([*TUNE, "--report", "."], "it is a directory"),
        ([*TUNE, "--json", "tiny.jsonl.gz/x.json"], "is not a directory"),
        ([*TUNE, "--storage", ""], "the storage URL is empty"),
        ([*TUNE, "--wait-idle", "soon"], "--wait-idle is 'soon'"),
        ([*TUNE, "--kernel", "nosuch"], "kernel 'nosuch' is unknown"),
        ([*TUNE, "--kernel", "vllm"], "is a recording of the builtin kernel, and vllm was asked for"),
        ([*TUNE, "--routing", "nosuch"], "routing 'nosuch' is unknown"),
        ([*TUNE, "--warm-l2"], "was measured with a cold L2, and a warm one was asked for"),
        ([*TUNE, "--routing", "zipf:1.2"], "is a recording of uniform routing, and zipf:1.2 was asked for"),
        ([*TUNE, "--workers", "0"], "workers is 0"),
        ([*TUNE, "--engine", "nosuch"], "engine 'nosuch' is unknown"),
        ([*TUNE, "--tp", "4"], "--experts is missing"),
        ([*TUNE, "--dtype", "fp8_w8a8"], "--experts is missing"),
        ([*TUNE, "--per-channel"], "--experts is missing"),
        (["plan", *SHAPE, "--gpu", "NVIDIA H200", "--trials", "0"], "trials is 0"),
        (
            ["plan", *SHAPE, "--gpu", "NVIDIA H200", "--batch-sizes", "1000000000"],
            "batch_sizes is [1000000000]: give at least one batch size from 1 to 1048576",
        ),
        (["plan", *SHAPE[:-1], "64", "--gpu", "recorded:tiny.jsonl.gz"], "is a recording of E8-top2-K256-N128-bf16"),
        (["record", "tiny.jsonl.gz", *SHAPE], "tiny.jsonl.gz is there already"),
        (["record", "new.jsonl.gz", *SHAPE, "--slow-factor", "nan"], "--slow-factor is nan"),
        (["status", "--interval", "nan"], "--interval is nan"),
        (["worker", "--storage", "x.db", "--idle", "soon"], "--idle is 'soon'"),
    ],
)
def test_one_line_and_nothing_written(
    run: Run, tiny_recording: Write, tmp_path: Path, args: list[str], message: str
) -> None:
    tiny_recording()
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("*.json"))


def test_an_unknown_log_level(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEOPT_LOG", "nonsense")
    done = run("models")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "moeopt: MOEOPT_LOG is 'nonsense': give DEBUG, INFO, WARNING, ERROR, CRITICAL, or leave it unset\n"
    )
    for unset in ("", "info"):
        monkeypatch.setenv("MOEOPT_LOG", unset)
        assert run("--version").returncode == 0


@pytest.fixture
def tuned(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    """A tune of each mode in ``s.db``; made once."""
    tiny_recording()
    database = tmp_path / "s.db"
    if not MADE:
        for mode in ("split", "joint"):
            assert run(*TUNE, "--storage", database, "--mode", mode).returncode == 0
        MADE.append(database.read_bytes())
    database.write_bytes(MADE[0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["export", "sglang:out"], "holds 2 results that fit"),
        (["export", "sglang:out", "--mode", "both"], "mode 'both' is unknown"),
        (["export", "sglang:out", "--key", "nosuch"], "holds no results for any shape, key nosuch"),
        (["export", "sglang:out", "--mode", "split", "--dtype", "fp8_w8a8"], "--experts is missing"),
        (["export", "sglang:out", "--mode", "split", "--json", "."], "it is a directory"),
        (["export", "sglang:out", "--mode", "split", "--routing", "uniform"], "--routing goes with --gpu"),
        (
            ["export", "sglang", "--install", "--engine-dir", "nosuch", "--mode", "split"],
            "nosuch is not a package of sglang",
        ),
        (["verify", "--gpu", "recorded:tiny.jsonl.gz"], "holds 2 results that fit"),
        (["report", ".", "--mode", "split"], "it is a directory"),
    ],
)
@pytest.mark.usefixtures("tuned")
def test_of_a_storage(run: Run, tmp_path: Path, args: list[str], message: str) -> None:
    done = run(*args, "--storage", "s.db")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("tuned")
def test_a_key_says_which_result(run: Run, tmp_path: Path) -> None:
    listed = json.loads(run("status", "--storage", "s.db", "--json").stdout)["studies"]
    keys = [one["key"]["digest"] for one in listed]
    assert len(set(keys)) == 2
    for key in keys:
        done = run("export", f"sglang:{key}", "--storage", "s.db", "--key", key)
        assert done.returncode == 0, done.stderr
        done = run("verify", "--gpu", "recorded:tiny.jsonl.gz", "--storage", "s.db", "--key", key)
        assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("tuned")
def test_files_and_a_storage_contradict_each_other(run: Run) -> None:
    assert run("export", "sglang:out", "--storage", "s.db", "--mode", "split").returncode == 0
    args = ["verify", "--gpu", "recorded:tiny.jsonl.gz", "--tuned", "out"]
    done = run(*args, "--storage", "s.db")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr
    done = run(*args, "--batch-sizes", "16,17")
    assert done.returncode == 2
    assert "batch size 17 is not in the recording" in done.stderr


def test_measured_configs_stay_out_of_suggestions(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    tiny_recording()
    done = run("suggest", "out", *SHAPE, "--gpu", "NVIDIA H200", "--batch-sizes", "16")
    assert done.returncode == 0, done.stderr
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.json")}
    done = run(*TUNE, "--storage", "s.db", "--export", "sglang:out")
    assert done.returncode == 2
    assert MARKER in done.stderr
    assert not (tmp_path / "s.db").exists()
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.json")}


@pytest.mark.usefixtures("tuned")
def test_no_command_writes_measured_configs_into_suggestions(run: Run, tmp_path: Path) -> None:
    """vLLM's files have the names of SGLang's, which lie two directories below the mark."""
    done = run("suggest", "out", *SHAPE, "--gpu", "NVIDIA H200", "--batch-sizes", "16", "--triton", "3.6.0")
    assert done.returncode == 0, done.stderr
    (inside,) = (tmp_path / "out" / "configs").iterdir()
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.json")}
    for args in (
        ["export", f"vllm:{inside}", "--mode", "joint"],
        ["export", "sglang:out", "--mode", "split", "--replace"],
        ["verify", "--gpu", "recorded:tiny.jsonl.gz", "--mode", "split", "--export", "out"],
    ):
        done = run(*args, "--storage", "s.db")
        assert done.returncode == 2
        assert MARKER in done.stderr
        assert "replaying" not in done.stdout, "refused before anything is timed"
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.json")}


def test_a_plan_of_a_recording_needs_no_shape(run: Run, tiny_recording: Write) -> None:
    tiny_recording()
    done = run("plan", "--gpu", "recorded:tiny.jsonl.gz")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny.jsonl.gz would be replayed")
    assert "for each of 3 batch sizes" in done.stdout


def test_vllm_is_told_which_batch_sizes_have_no_joint_config(tiny_recording: Write, tmp_path: Path) -> None:
    result = moeopt.tune(gpu=f"recorded:{tiny_recording()}", storage=str(tmp_path / "s.db"), progress=False)
    assert result.left_out("vllm") == ""
    rows = {m: replace(row, joint_config=None) if m == 16 else row for m, row in result.rows.items()}
    assert "at batch size 16, which vLLM needs" in replace(result, rows=rows).left_out("vllm")
    assert replace(result, rows=rows).left_out("sglang") == ""


def test_times_of_a_routing_file_need_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((4, 1), dtype=np.int32))
    times = Provenance("a test", "builtin", routing=Routing.parse(f"file:{path}").key)
    with pytest.raises(InvalidInputError, match="give it again with --routing file:PATH"):
        DeviceOptions.as_measured(times)
    with pytest.raises(InvalidInputError, match="these times are of"):
        DeviceOptions.as_measured(times, "uniform")
    again = DeviceOptions.as_measured(replace(times, warm_l2=True), f"file:{path}")
    assert (again.routing, again.warm_l2) == (f"file:{path}", True)
    assert DeviceOptions.as_measured(
        Provenance("a test", "builtin", routing="zipf:1.2", warm_l2=True)
    ) == DeviceOptions(kernel="builtin", routing="zipf:1.2", warm_l2=True)


def test_a_ray_cluster_that_is_not_there(tiny_recording: Write) -> None:
    """In a process of its own: here a test may have joined a cluster."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        args = ["tune", "--gpu", f"recorded:{tiny_recording()}", "--executor", "ray", "--storage", "never.db"]
        done = subprocess.run(
            [sys.executable, "-m", "moeopt.cli", *args],
            env={**os.environ, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 2
    assert f"cannot reach the Ray cluster at {address}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_stdout_is_no_error() -> None:
    command = f"{sys.executable} -m moeopt.cli models >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
