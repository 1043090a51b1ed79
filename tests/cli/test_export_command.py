"""``moeopt export``: from a study database to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.export import export_configs, read_config_file, start_line
from moeopt.models import shape_from_model
from tests.cli.conftest import Run

Write = Callable[..., Path]
CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
UP = "E=8,N=128,device_name=NVIDIA_H200.json"


@pytest.fixture
def tuned(run: Run, tiny_recording: Write) -> str:
    gpu = f"recorded:{tiny_recording()}"
    done = run("tune", "--gpu", gpu, "--trials", "8", "--storage", "s.db", "--export", "sglang:first")
    assert done.returncode == 0, done.stderr
    return gpu


def test_what_tune_exported_comes_again(run: Run, tuned: str, tmp_path: Path) -> None:
    done = run("export", "sglang:second", "--storage", "s.db", "--json", "e.json")
    assert done.returncode == 0, done.stderr
    first, second = (sorted((tmp_path / d).rglob("*.json")) for d in ("first", "second"))
    assert [p.read_text() for p in first] == [p.read_text() for p in second] and len(second) == 2
    answer = json.loads((tmp_path / "e.json").read_text())
    assert answer["batch_sizes"] == [1, 16, 64] and len(answer["paths"]) == 2
    assert answer["start"].startswith(f"SGLANG_MOE_CONFIG_DIR={tmp_path / 'second'} python -m sglang.launch_server")
    assert answer["start"] in done.stdout


def test_merging_and_replacing(run: Run, tuned: str, tmp_path: Path) -> None:
    config = LaunchConfig(16, 64, 64, 1, 4, 3)
    shape = MoEShape(8, 2, 256, 128)
    up, _ = export_configs(
        "sglang", tmp_path / "out", shape, "NVIDIA H200", "3.6.0", ConfigTable.of({1: config, 512: config})
    )
    run("export", "sglang:out", "--storage", "s.db", "--triton", "3.6.0")
    assert list(read_config_file(up).entries) == [1, 16, 64, 512]
    run("export", "sglang:out", "--storage", "s.db", "--triton", "3.6.0", "--replace")
    assert list(read_config_file(up).entries) == [1, 16, 64]


def test_another_server(run: Run, tuned: str, tmp_path: Path) -> None:
    name = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    done = run("export", "sglang:out", "--storage", "s.db", "--triton", "3.7.1", "--gpu-name", name)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/configs/triton_3_7_1" / UP.replace("NVIDIA_H200", name.replace(" ", "_"))).is_file()


def test_install_into_a_package(run: Run, tuned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    inside = tmp_path / "sglang/srt/layers/moe/moe_runner/triton_utils"
    (inside / "configs").mkdir(parents=True)
    done = run("export", "sglang", "--install", "--engine-dir", "sglang", "--storage", "s.db", "--triton", "3.6.0")
    assert done.returncode == 0, done.stderr
    assert (inside / "configs/triton_3_6_0" / UP).is_file()
    assert "beside the files that sglang ships" in done.stdout


def test_a_ladder_estimated_from_the_recording(run: Run, tuned: str, tmp_path: Path) -> None:
    done = run("export", "sglang:out", "--storage", "s.db", "--ladder", "auto", "--gpu", tuned, "--json", "e.json")
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "e.json").read_text())
    assert {1, 16, 64} <= set(answer["batch_sizes"])
    assert [a["batch_size"] for a in answer["added"]] == sorted(set(answer["batch_sizes"]) - {1, 16, 64})
    assert all(a["gain"] > 0.02 for a in answer["added"])
    assert ("added batch size" in done.stdout) == bool(answer["added"])
    assert run("export", "sglang:two", "--storage", "s.db", "--ladder", "auto").returncode == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tgi:out"], "engine 'tgi' is unknown"),
        (["sglang"], "names no directory"),
        (["sglang:"], "names no directory"),
        (["sglang:out", "--install"], "give one of them"),
        (["sglang:out", "--engine-dir", "x"], "--engine-dir goes with --install"),
        (["sglang:out", "--ladder", "2"], "--ladder is '2'"),
        (["sglang:out", "--gpu", "cuda:0"], "--gpu goes with --ladder auto"),
        (["sglang:out", "--experts", "8"], "--top-k is missing"),
        (["sglang:out", "--storage", "none.db"], "none.db"),
        (["sglang:out", "--storage", "s.db", "--triton", "main"], "Triton version 'main' has no number"),
        (["sglang:s.db", "--storage", "s.db"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Run, tuned: str, args: list[str], words: str) -> None:
    done = run("export", *args)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_database_claims_nothing_of_what_was_raced_out(run: Run, tmp_path: Path) -> None:
    """The time of a config that was raced out is a bound: rows that would follow from it were losses when measured."""
    recording = "recorded:h200-E256-top8-K3072-N256-bf16.jsonl.gz"
    assert run("tune", "--gpu", recording, "--seed", "0", "--storage", "s.db").returncode == 0
    done = run("export", "sglang:a", "--storage", "s.db", "--ladder", "auto", "--json", "a.json")
    assert done.returncode == 0, done.stderr
    added = {one["batch_size"] for one in json.loads((tmp_path / "a.json").read_text())["added"]}
    assert not added & {31, 65}


@pytest.mark.parametrize(
    ("target", "model", "option"),
    [
        ("sglang:out", "quant-ct-int4", "--moe-runner-backend triton"),
        ("vllm:out", "quant-ct-int4", "--moe-backend triton"),
        ("sglang:out", "awq", "--quantization moe_wna16"),
        ("vllm:out", "awq", "--quantization moe_wna16"),
    ],
)
def test_the_start_has_the_flag_that_the_engine_takes(
    run: Run, tmp_path: Path, target: str, model: str, option: str
) -> None:
    config = json.loads((CHECKPOINTS / "quant-ct-int4.json").read_text())
    if model == "awq":
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, derivation = shape_from_model(tmp_path / "config.json", engine=target.partition(":")[0], tp=8)
    assert option in start_line(target.partition(":")[0], tmp_path, shape, "m", derivation.checkpoint)
