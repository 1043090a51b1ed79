"""``moeopt`` alone: what it sees, and what it says comes next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt.cli import overview
from moeopt.measure.monitor import GpuMonitor
from tests.measure.measure_nvml import Nvml

from .conftest import Run

Write = Callable[..., Path]


def test_without_anything_it_offers_a_replay_and_a_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "gpu_count", lambda: None)
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "none: the driver shows no CUDA GPU here" in done.stdout
    assert "moeopt tune --gpu recorded:h200-E256-top8-K3072-N256-bf16.jsonl.gz" in done.stdout
    assert 'moeopt plan --model DIR --tp N --gpu "NVIDIA H200"' in done.stdout
    assert "moeopt status" not in done.stdout


def test_gpus_engines_and_who_uses_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    nvml.processes = {}
    monitors = [GpuMonitor(nvml, handle) for handle in (0, 1)]
    nvml.processes = {4321: 75 * 2**30}
    monkeypatch.setattr(overview, "gpu_count", lambda: 2)
    monkeypatch.setattr(overview.GpuMonitor, "open", lambda index: monitors[index])
    versions = {"vllm": "0.33.0", "triton": "3.6.0", "torch": "2.11.0"}
    monkeypatch.setattr(overview, "_version", lambda name: versions.get(name, ""))
    said = run().stdout
    assert "2 x NVIDIA H200, driver 580.1" in said
    assert "cuda:1 is in use by server (pid 4321) with 75.0 GiB" in said
    assert "vLLM 0.33.0" in said and "SGLang 0" not in said
    assert "moeopt tune --model DIR --tp N --engine vllm --mode joint --export vllm:moe-configs" in said
    assert "recorded:" not in said


def test_databases_here_are_named_and_nothing_else(run: Run, tiny_recording: Write, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("no database")
    assert run("tune", "--gpu", f"recorded:{tiny_recording()}", "--trials", "3").returncode == 0
    said = run().stdout
    assert "studies/moeopt.db: E8-top2-K256-N128-bf16 | NVIDIA H200 (recorded) | builtin | triton 3.6.0: " in said
    assert "notes.db" not in said
    assert "    moeopt status " in said


def test_a_database_elsewhere_is_named_in_the_command(run: Run, tiny_recording: Write) -> None:
    run("tune", "--gpu", f"recorded:{tiny_recording()}", "--trials", "3", "--storage", "mine.db")
    assert "moeopt status --storage mine.db" in run().stdout
