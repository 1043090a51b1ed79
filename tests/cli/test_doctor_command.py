"""``moeopt doctor``: verdict first, exit status, JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

LOGS = Path(__file__).parents[1] / "data" / "logs"
QWEN = LOGS / "sglang-qwen3.5-122b-no-file.log"
TUNED = (
    "server_args={'model_path': '/m', 'moe_runner_backend': 'auto', 'tp_size': 1}\n"
    "Using MoE kernel config from /c/configs/triton_3_6_0/E=8,N=64,device_name=NVIDIA_H200.json.\n"
    "Using MoE kernel config from /c/configs/triton_3_6_0/E=8,N=64,device_name=NVIDIA_H200_down.json.\n"
)
SHAPE = ["--experts", "8", "--top-k", "2", "--hidden", "256", "--intermediate", "64"]


def test_verdict_first_then_evidence_then_the_command(run: Run) -> None:
    done = run("doctor", "--log", QWEN)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0].startswith("Not tuned: SGLang found no file for E=256,N=256")
    assert any(line.strip().startswith("line 11: ") for line in lines)
    assert lines[lines.index("run next:") + 2].strip().startswith("moeopt tune --model model --engine sglang --tp 4")


def test_glm5(run: Run) -> None:
    done = run("doctor", "--log", LOGS / "sglang-glm5-nvfp4-flashinfer-cutlass.log")
    assert done.returncode == 1
    assert done.stdout.startswith("Not in use: SGLang runs the experts with flashinfer_cutlass")


def test_status_0_where_the_files_are_in_use(run: Run, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(TUNED)
    assert run("doctor", "--log", "server.log").returncode == 0


def test_json(run: Run) -> None:
    done = run("doctor", "--log", QWEN, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == answer["status"] == 1
    assert answer["verdict"]["code"] == "default" and answer["engine"] == "sglang"
    assert answer["layers"][0]["experts"] == 256 and answer["layers"][0]["up"]["state"] == "default"
    assert [e["line"] for e in answer["findings"][0]["evidence"]] == [11, 13]


def test_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TUNED.encode())))
    assert run("doctor", "--log", "-").returncode == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing to look at"),
        (["--log", "no.log"], "no.log cannot be read"),
        (["--config-dir", "no"], "no is not a directory"),
        (["--config-dir", ".", "--engine", "tgi"], "engine 'tgi' is unknown"),
        (["--config-dir", ".", "--engine", "sglang", *SHAPE], "--gpu is missing"),
        (["--config-dir", ".", "--engine", "sglang", *SHAPE, "--gpu", "NVIDIA H200"], "--triton is missing"),
        (["--config-dir", ".", "--experts", "8"], "--top-k is missing"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Run, args: list[str], words: str) -> None:
    done = run("doctor", *args)
    assert done.returncode == 2
    assert done.stderr.startswith("moeopt: ") and words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_directory(run: Run, tmp_path: Path) -> None:
    name = "E=8,N=64,device_name=NVIDIA_H200.json"
    place = tmp_path / "c" / "configs" / "triton_3_6_0"
    place.mkdir(parents=True)
    (place / name).write_text('{"1": {"BLOCK_SIZE_M": 16}}')
    done = run("doctor", "--config-dir", "c")
    assert done.returncode == 1 and "key 'BLOCK_SIZE_N' is missing" in done.stdout
    done = run("doctor", "--config-dir", "c", *SHAPE, "--gpu", "NVIDIA H200", "--triton", "3.6.0")
    assert done.returncode == 1 and done.stdout.startswith("Broken: SGLang reads " + name)


QWEN_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "hidden_size": 3072,
    "moe_intermediate_size": 1024,
    "torch_dtype": "bfloat16",
}


def test_a_model_is_read_with_the_logs_own_parallelism(run: Run, tmp_path: Path) -> None:
    """N is 1024 / tp: the log says tp_size=4, so the server asks for what the model gives."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_CONFIG))
    answer = json.loads(run("doctor", "--log", QWEN, "--model", "config.json", "--json").stdout)
    assert "other_shape" not in [f["code"] for f in answer["findings"]]
    assert answer["next"][0].startswith("moeopt tune --model config.json --engine sglang --tp 4")
    answer = json.loads(run("doctor", "--log", QWEN, "--model", "config.json", "--tp", "2", "--json").stdout)
    assert "other_shape" in [f["code"] for f in answer["findings"]]


def test_a_model_that_the_kernel_does_not_serve(run: Run) -> None:
    """GLM-5's NVFP4 weights: beside its log that is one finding more, alone it is bad input."""
    model = LOGS.parent / "models" / "glm-5-nvfp4.json"
    done = run("doctor", "--log", LOGS / "sglang-glm5-nvfp4-flashinfer-cutlass.log", "--model", model)
    assert done.returncode == 1 and "note: " + str(model) in done.stdout and "NVFP4" in done.stdout
    assert run("doctor", "--log", QWEN, "--model", "none.json").returncode == 2
    assert run("doctor", "--config-dir", ".", "--engine", "sglang", "--model", model).returncode == 2


def test_a_gpu_may_be_named_shortly(run: Run, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    done = run("doctor", "--config-dir", ".", "--engine", "sglang", *SHAPE, "--gpu", "h200", "--triton", "3.6.0")
    assert "device_name=NVIDIA_H200.json" in done.stdout
