"""``moeopt tune``, ``plan``, ``record``, ``report``: output, exit status, files."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from moeopt.errors import InvalidInputError
from moeopt.tuning.options import TuneRequest
from tests.cli.conftest import Run

Write = Callable[..., Path]
SHAPE = ["--experts", "256", "--top-k", "8", "--hidden", "3072", "--intermediate", "256", "--dtype", "bf16"]


def test_tune_resume_export(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    gpu = f"recorded:{tiny_recording()}"
    args = ["tune", "--gpu", gpu, "--trials", "6", "--export", f"sglang:{tmp_path / 'out'}"]
    first = run(*args, "--json", "a.json")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0].startswith("replaying tiny.jsonl.gz: times measured earlier on NVIDIA H200")
    assert "6+6 of 140" in first.stdout
    files = sorted(p.name for p in (tmp_path / "out").rglob("*.json"))
    assert files == ["E=8,N=128,device_name=NVIDIA_H200.json", "E=8,N=128,device_name=NVIDIA_H200_down.json"]
    assert (tmp_path / "studies" / "moeopt.db").is_file()
    second = run(*args, "--json", "b.json")
    assert second.returncode == 0
    assert "nothing was timed again" in second.stdout
    a, b = (json.loads((tmp_path / f"{x}.json").read_text()) for x in "ab")
    assert b["counts"]["measured"] == 0
    assert a["batch_sizes"] == b["batch_sizes"]


def test_a_study_file_tunes_and_exports(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    tiny_recording()
    (tmp_path / "s.toml").write_text(
        "[shape]\nnum_experts = 8\ntop_k = 2\nhidden_size = 256\nintermediate_size = 128\n"
        '[tune]\ntrials = 3\ngpu = "recorded:tiny.jsonl.gz"\n[export]\nengine = "vllm"\ndirectory = "out"\n'
    )
    done = run("tune", "s.toml", "--storage", "x.db", "--mode", "joint")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["E=8,N=128,device_name=NVIDIA_H200.json"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tune"], "--experts is missing"),
        (["tune", *SHAPE[:-1], "fp7"], "dtype 'fp7' is unknown"),
        (["tune", "--experts", "4", "--top-k", "8", "--hidden", "64", "--intermediate", "64"], "top_k 8 is greater"),
        (["tune", *SHAPE, "--gpu", "tpu:0"], "gpu 'tpu:0' is unknown: give cuda:0, all, or recorded:FILE"),
        (["tune", *SHAPE, "--batch-sizes", "0"], "batch_sizes is [0]: give at least one batch size from 1 to 1048576"),
        (["tune", *SHAPE, "--batch-sizes", "x"], "--batch-sizes is 'x'"),
        (["tune", *SHAPE, "--block-shape", "128"], "--block-shape is '128'"),
        (["tune", *SHAPE, "--tp", "4"], "--tp, --ep and --fuse-shared go with --model"),
        (["tune", "none.toml"], "no such study file"),
        (["tune", "--gpu", "recorded:none.gz"], "recording 'none.gz' was not found"),
        (["tune", *SHAPE, "--timeout", "soon"], "timeout is 'soon'"),
        (["tune", *SHAPE, "--export", "trt:x"], "--export is 'trt:x': give sglang:DIR or vllm:DIR"),
        (["tune", *SHAPE, "--trials", "0", "--gpu", "recorded:x"], "trials is 0"),
        (["plan", *SHAPE, "--gpu", "RTX 9090"], "GPU 'RTX 9090' is unknown: did you mean NVIDIA GeForce RTX 5090 or "),
        (["record", "x.json", *SHAPE], "must end in .jsonl.gz"),
        (["report", "x.html", "--storage", "none.db"], "none.db"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Run, tmp_path: Path, args: list[str], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.json"))


def test_no_gpu_and_no_recording_says_what_to_do(run: Run) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run("tune", *SHAPE)
    assert done.returncode == 2
    assert "no CUDA GPU was found" in done.stderr and "recorded:FILE" in done.stderr


def test_recordings_that_cannot_be_used(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    good = tiny_recording().read_bytes()
    cases = {
        "truncated.gz": good[: len(good) // 2],
        "text.gz": b"hello",
        "other.gz": gzip.compress(b'{"format": "other/2"}\n'),
        "lines.gz": gzip.compress(gzip.decompress(good)[:-40]),
        "empty.gz": b"",
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        done = run("tune", "--gpu", f"recorded:{name}", "--storage", "x.db")
        assert done.returncode == 2, name
        assert name in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_an_unwritable_directory_is_found_before_the_run(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    gpu = f"recorded:{tiny_recording()}"
    done = run("tune", "--gpu", gpu, "--export", "sglang:file/out", "--storage", "x.db")
    assert done.returncode == 2
    assert "file/out cannot be written" in done.stderr
    assert not (tmp_path / "x.db").exists()


def test_a_storage_that_is_no_database(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("this is no database, it is a text")
    done = run("tune", "--gpu", f"recorded:{tiny_recording()}", "--storage", "x.db")
    assert done.returncode == 2
    assert "x.db" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "x.db").read_text() == "this is no database, it is a text"


def test_report_and_version(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    assert run("tune", "--gpu", f"recorded:{tiny_recording()}", "--trials", "3").returncode == 0
    done = run("report", "r.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "r.html").read_text()
    assert "E8-top2-K256-N128-bf16 on NVIDIA H200" in page and "<svg" in page
    assert run("--version").stdout.startswith("moeopt 0")
    assert "tune" in run("--help").stdout


def test_a_resumed_run_says_what_was_timed_before(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    args = ("tune", "--gpu", f"recorded:{tiny_recording()}", "--trials", "6", "--batch-sizes", "16")
    assert run(*args, "--report", "a.html", "--json", "a.json").returncode == 0
    again = run(*args, "--report", "b.html", "--json", "b.json").stdout
    assert run("report", "c.html").returncode == 0
    first, second = (json.loads((tmp_path / f"{x}.json").read_text())["counts"] for x in "ab")
    timed, failed = first["measured"], first["failed"]
    assert timed == 12 and failed > 0
    assert second["measured"] == second["compiled"] == 0
    assert f" {timed + failed} from the study database ({timed} timed, {failed} failed), " in again
    pages = [(tmp_path / f"{x}.html").read_text() for x in "abc"]
    assert all("All runs of the study" in page for page in pages)


@pytest.mark.parametrize(
    ("args", "engine"),
    [
        ([], None),
        (["--engine", "vllm"], "vllm"),
        (["--engine", "sglang"], "sglang"),
        (["--engine", "vllm", "--export", "sglang:out"], "sglang"),
    ],
)
def test_the_engine_is_what_auto_looks_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: list[str], engine: str | None
) -> None:
    """Also without a model."""
    asked: list[TuneRequest] = []

    def open_tune(request: TuneRequest) -> NoReturn:
        asked.append(request)
        raise InvalidInputError("enough")

    monkeypatch.setattr("moeopt.cli.tune.open_tune", open_tune)
    assert "enough" in run("tune", *SHAPE, *args).stderr
    assert asked[0].device.engine == engine


def test_an_engine_that_nobody_knows(run: Run) -> None:
    assert "engine 'tgi' is unknown" in run("tune", *SHAPE, "--engine", "tgi").stderr


def test_as_a_process(tiny_recording: Write, tmp_path: Path) -> None:
    """The console script: the status reaches the shell, and a closed pipe is no error."""
    for module in ("moeopt", "moeopt.cli"):
        command = [sys.executable, "-m", module, "tune", "none.toml"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "moeopt: none.toml: no such study file; give the path of a TOML file\n"
    done = subprocess.run(
        f"{sys.executable} -m moeopt.cli tune --gpu recorded:{tiny_recording()} --trials 2 --storage p.db | true",
        cwd=tmp_path,
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert "Traceback" not in done.stderr


def test_a_tune_whose_files_another_kernel_would_not_read_says_so(run: Run, tmp_path: Path) -> None:
    int4 = "recorded:h200-E128-top8-K2048-N768-int4_w4a16-g128.jsonl.gz"
    done = run(
        "tune", "--gpu", int4, "--batch-sizes", "1", "--trials", "2", "--storage", "s.db", "--export", "sglang:o"
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("warning: ")]
    assert (
        "SGLang on NVIDIA H200: not read: Marlin runs by default; start the server with --quantization moe_wna16"
        in line
    )
    bf16 = "recorded:h200-E128-top8-K2048-N768-bf16.jsonl.gz"
    done = run(
        "tune", "--gpu", bf16, "--batch-sizes", "1", "--trials", "2", "--storage", "s.db", "--export", "sglang:p"
    )
    assert "warning: " not in done.stdout
