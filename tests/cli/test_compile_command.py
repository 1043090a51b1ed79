"""moeopt compile without a GPU."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from moeopt.cli import build_app
from moeopt.core.space import SearchSpace
from moeopt.errors import InvalidInputError, UnknownGpuError
from moeopt.recordings.format import Recording

SHAPE = ("--experts", "8", "--top-k", "2", "--hidden", "512", "--intermediate", "256", "--dtype", "bf16")
FEW = {
    "BLOCK_SIZE_M": (16, 256),
    "BLOCK_SIZE_N": (32, 256),
    "BLOCK_SIZE_K": (64,),
    "GROUP_SIZE_M": (1, 16),
    "num_warps": (4,),
    "num_stages": (5,),
}


@pytest.mark.slow
def test_writes_a_recording_and_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SearchSpace, "named", classmethod(lambda cls, name, shape, **_: cls("few", FEW)))
    out, cache = tmp_path / "few.jsonl.gz", tmp_path / "cache"
    args = [
        "compile", *SHAPE, "--gpu", "rtx pro 6000 blackwell server edition", "--out", str(out),
        "--cache-dir", str(cache), "--workers", "1", "--one-group",
    ]  # fmt: skip
    first = CliRunner().invoke(build_app(), args)
    assert first.exit_code == 0, first.output
    assert "4 configs: 3 over the GPU's limits, 1 legal, of which 1 compiled now and 0 before" in first.output
    assert "tensor-core instruction: mma m16n8k16 bf16: 2" in first.output
    assert list(cache.rglob("*.cubin"))
    second = CliRunner().invoke(build_app(), args)
    assert "0 compiled now and 1 before" in second.output
    recording = Recording.load(out)
    assert recording.gpu.sm == 120
    assert sorted(row.status for row in recording.rows.values()) == ["ok", *["out_of_resources"] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_one_keeps_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    out, cache = tmp_path / "grid.jsonl.gz", tmp_path / "cache"
    args = ["compile", *SHAPE, "--gpu", "NVIDIA H200", "--workers", "1", "--out", str(out), "--cache-dir", str(cache)]
    process = subprocess.Popen([sys.executable, "-m", "moeopt.cli", *args], stdout=subprocess.PIPE, text=True)
    # Not rglob: Triton's temporary directories beside the binaries go while they are walked.
    while len(list(cache.glob("*/*.cubin"))) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: the same command goes on from there" in said
    recording = Recording.load(out)
    assert not recording.header.complete
    assert 1 <= sum(row.status == "ok" for row in recording.rows.values()) < 100


@pytest.mark.parametrize(("args", "engine"), [((), None), (("--engine", "vllm"), "vllm")])
def test_auto_takes_the_engine_that_is_here(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], engine: str | None
) -> None:
    """Unless one is named."""
    asked: list[tuple[str, str | None]] = []

    def get_kernel(name: str, *, engine: str | None = None) -> NoReturn:
        asked.append((name, engine))
        raise InvalidInputError("enough")

    monkeypatch.setattr("moeopt.kernels.get_kernel", get_kernel)
    CliRunner().invoke(build_app(), ["compile", *SHAPE, "--gpu", "H200", "--kernel", "auto", *args])
    assert asked == [("auto", engine)]


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (SHAPE, InvalidInputError, "--gpu is missing"),
        ((*SHAPE, "--gpu", "RTX 1"), UnknownGpuError, "known GPUs"),
        ((*SHAPE, "--gpu", "NVIDIA H200", "--out", "x.json"), InvalidInputError, "jsonl.gz"),
        ((*SHAPE, "--gpu", "NVIDIA H200", "--space", "huge"), InvalidInputError, "huge"),
        (("--gpu", "NVIDIA H200"), InvalidInputError, "--experts is missing"),
    ],
)
def test_bad_input_is_one_line(args: tuple[str, ...], error: type[Exception], words: str) -> None:
    done = CliRunner().invoke(build_app(), ["compile", *args])
    assert isinstance(done.exception, error)
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)
