"""The GPU benchmarks' command lines, choices and tables, and a tiny run on the CPU."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import joblib
import pytest

from benchmarks import correctness, gpu_run, parity
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import DTYPES, ROLES
from moeopt.kernels.builtin import BuiltinKernel
from tests.kernels.schemes import small_shape

H200, RTX = GpuSpec.by_name("H200"), GpuSpec.by_name("RTX 5090")
TILE = LaunchConfig(16, 32, 64, 1, 4, 3)


def row(ratio: float, dtype: str = "bf16") -> parity.Row:
    return parity.Row(dtype, "up", 64, TILE, 100.0 * ratio, 100.0, 0.0017, 0.0016)


def test_parity_summary() -> None:
    rows = [row(0.5), row(2.0), row(1.0, "fp8")]
    mean, worst = parity.summary(rows)
    assert mean == pytest.approx(1.0) and worst is rows[1]
    text = parity.report(rows)
    assert "geometric mean 1.0000 (bar 1.02), worst 2.000 (bf16 up M=64 16x32x64 G1 w4 s3; bar 1.1)" in text
    assert "fp8: geometric mean 1.0000" in text
    first, second = text.splitlines()[:2]
    assert len(first) == len(second) and second.split()[-4:] == ["50.00", "100.00", "0.500", "0.0017"]


@pytest.mark.parametrize("gpu", [H200, RTX], ids=lambda g: f"sm_{g.sm}")
def test_parity_configs_are_legal_and_hold_the_default(gpu: GpuSpec) -> None:
    kernel = BuiltinKernel()
    for dtype, shape in parity.SHAPES.items():
        for m in parity.parse([]).batch_sizes:
            configs = parity.configs_for(dtype, m, kernel, gpu)
            assert len(configs) >= 2 and len(set(configs)) == len(configs)
            assert configs[0] == kernel.default_config(shape, "up", m, gpu)


def test_parity_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = parity.parse(["--dtypes", "fp8", "--batch-sizes", "1", "64", "--rounds", "3"])
    assert (args.dtypes, args.batch_sizes, args.rounds) == (["fp8"], [1, 64], 3)
    for bad in (["--rounds", "0"], ["--batch-sizes", "0"], ["--dtypes", "int3"]):
        with pytest.raises(SystemExit):
            parity.parse(bad)
    assert "at least 1" in capsys.readouterr().err


def test_correctness_covers_every_dtype() -> None:
    shapes = [case.shape for case in correctness.CASES]
    assert {s.dtype for s in shapes} == set(DTYPES)
    assert {s.group_size for s in shapes if s.dtype == "int4_w4a16"} == {32, 64, 128}
    assert max(s.num_experts for s in shapes) == 1024 and {s.top_k for s in shapes} >= {1, 22}
    assert max(max(c.batch_sizes) for c in correctness.CASES) == 16384
    for gpu in (H200, RTX):
        for case in correctness.CASES:
            BuiltinKernel().check(case.shape, gpu)
            for role in ROLES:
                assert len(correctness.legal_configs(BuiltinKernel(), case.shape, role, gpu)) >= 2
            assert 0 < correctness.bytes_needed(case) < H200.memory_bytes


def test_correctness_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert [c.name for c in correctness.parse(["--cases", "top 1"]).chosen] == ["bf16 top 1"]
    assert len(correctness.parse([]).chosen) == len(correctness.CASES)
    with pytest.raises(SystemExit):
        correctness.parse(["--cases", "fp4"])
    assert "the cases are bf16, fp16" in capsys.readouterr().err


def test_correctness_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "CONFIGS", (TILE, LaunchConfig(16, 16, 32, 1, 4, 2)))
    case = correctness.Case("tiny", small_shape("fp8-block"), (1, 3), "zipf:1.5")
    rows = correctness.measure(case, BuiltinKernel(), H200, "cpu")
    assert [(r.role, r.batch_size) for r in rows] == [("up", 1), ("down", 1), ("up", 3), ("down", 3)]
    assert all(0 < r.error < 1e-2 and r.configs == 1 for r in rows)  # 64 straddles scales of 32
    assert rows[0].cells()[:3] == ["tiny", "up", "1"]


def test_without_a_gpu_they_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert parity.main([]) == 2 and correctness.main([]) == 2
    assert capsys.readouterr().err.count("no CUDA GPU was found") == 2


@pytest.mark.slow
def test_compiling_ahead_fills_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("joblib.Parallel", functools.partial(joblib.Parallel, backend="sequential"))
    shape, wrong = small_shape("bf16"), LaunchConfig(16, 48, 32, 1, 4, 2)
    binaries = [gpu_run.Binary(BuiltinKernel(), shape, "up", m, TILE) for m in (1, 64)]
    assert gpu_run.compile_ahead(binaries, (12, 0)) == []
    assert len(list(tmp_path.glob("*/*.cubin"))) == 1
    (line,) = gpu_run.compile_ahead([gpu_run.Binary(BuiltinKernel(), shape, "up", 1, wrong)], (12, 0))
    assert line.startswith(f"builtin {shape.slug()} up 16x48x32 G1 w4 s2: ") and "\n" not in line


def test_facts_and_files(tmp_path: Path) -> None:
    facts = gpu_run.machine_facts(H200)
    assert facts["gpu"] == "NVIDIA H200" and facts["versions"]["triton"]
    path = tmp_path / "deep" / "a.json"
    gpu_run.write_json(path, {"machine": facts, "value": math.pi})
    assert json.loads(path.read_text(encoding="utf-8"))["value"] == math.pi
    assert gpu_run.table(["a", "b"], [["long", "1"]]) == "a     b\nlong  1"
