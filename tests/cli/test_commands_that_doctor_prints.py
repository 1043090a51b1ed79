"""Run as printed, a command of the doctor's tunes exactly the file that the server asks for."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moeopt import engines
from moeopt.doctor import scan_log
from moeopt.doctor.layers import layers_of
from moeopt.doctor.verdict import engine_of
from moeopt.export import ConfigName
from tests.cli.conftest import Run

DATA = Path(__file__).parents[1] / "data"
LOGS, CHECKPOINTS = DATA / "logs", DATA / "checkpoints"
BF16, SHARED = CHECKPOINTS / "toy-bf16.json", CHECKPOINTS / "toy-shared.json"
H200 = "NVIDIA H200"
NOT_FOUND = "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at"
VLLM_NOT_FOUND = "Using default MoE config. Performance might be sub-optimal! Config file not found at"


def printed(out: str) -> list[str]:
    """The commands under ``run next``."""
    _, _, after = out.partition("run next:\n")
    return [line.strip() for line in after.splitlines() if line.strip()]


def planned(run: Run, command: str, **known: str) -> list[str]:
    """Names of the files that a printed tune would write."""
    for word, value in known.items():
        command = command.replace(word, value)
    words = shlex.split(command)
    assert words[:2] == ["moeopt", "tune"]
    options, export = words[2:], words[words.index("--export") + 1]
    for option in ("--export", "--mode"):
        if option in options:
            at = options.index(option)
            del options[at : at + 2]
    done = run("plan", *options, "--gpu", "H200", "--triton", "3.6.0", "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    return [Path(f).name for f in json.loads(Path("plan.json").read_text())["files"][export.partition(":")[0]]]


def asked(log: Path) -> list[str]:
    """Names of the files that a log's server asked for."""
    facts = scan_log(log)
    engine = engine_of(facts)
    assert engine is not None
    return [str(layer.name) for layer in layers_of(facts, engines.get(engine))[0]]


def sglang(asked_for: list[str], **settings: object) -> str:
    given = {"model_path": "/m", "tp_size": 8, "ep_size": 1, "quantization": None, "moe_runner_backend": "auto"}
    listed = ", ".join(f"{key}={value!r}" for key, value in {**given, **settings}.items())
    lines = [f"[2026-01-01 00:00:00] server_args=ServerArgs({listed}, log_level='info')"]
    lines += [f"{NOT_FOUND} /x/configs/triton_3_6_0/{name}, you can" for name in asked_for]
    return "\n".join([*lines, "The server is fired up and ready to roll!"])


def vllm(asked_for: list[str], **settings: object) -> str:
    given = {"model": "/m", "tensor_parallel_size": 8}
    lines = [f"(APIServer pid=1) INFO [startup.py:96] non-default args: { ({**given, **settings})!r}"]
    lines += ["(EngineCore pid=2) INFO Initializing a V1 LLM engine (v0.33.0) with config: model='/m'"]
    lines += [f"{VLLM_NOT_FOUND} /x/{name}" for name in asked_for]
    return "\n".join([*lines, "INFO:     Application startup complete."])


FP8 = "device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
FLAT8 = FP8.replace(", ", ",")
# What the server says; the model; what the command must have.
SERVERS: list[tuple[str, str, Path, list[str]]] = [
    ("fused", sglang([f"E=257,N=256,{FP8}"]), SHARED, ["--tp 8"]),
    ("not fused by a setting", sglang([f"E=256,N=256,{FP8}"], disable_shared_experts_fusion=True), SHARED,
     ["--no-fuse-shared"]),
    ("not fused, and nothing says so", sglang([f"E=256,N=256,{FP8}"]), SHARED, ["--no-fuse-shared"]),
    ("experts spread", sglang([f"E=32,N=2048,{FP8}"], ep_size=8), SHARED, ["--tp 8", "--ep 8"]),
    ("redundant experts", sglang([f"E=36,N=2048,{FP8}"], ep_size=8, ep_num_redundant_experts=32), SHARED,
     ["--experts 36"]),
    ("data-parallel experts", sglang([f"E=64,N=512,{FP8}"], ep_size=4, moe_dp_size=2, tp_size=32), SHARED,
     ["--tp 16", "--ep 4"]),
    ("online fp8", sglang(["E=64,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"], quantization="fp8"), BF16,
     ["--dtype fp8_w8a8"]),
    ("online fp8 by channel", sglang(["E=64,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json"],
     quantization="w8a8_fp8"), BF16, ["--dtype fp8_w8a8", "--per-channel"]),
    ("online int8", sglang(["E=64,N=128,device_name=NVIDIA_H200,dtype=int8_w8a8,per_channel_quant=True.json"],
     quantization="w8a8_int8"), BF16, ["--dtype int8_w8a8"]),
    ("an unquantised layer beside", sglang([f"E=257,N=256,{FP8}", "E=257,N=256,device_name=NVIDIA_H200.json"]), SHARED,
     ["--dtype bf16"]),
    ("vllm", vllm([f"E=256,N=256,{FLAT8}"]), SHARED, ["--engine vllm", "--tp 8"]),
    ("vllm by data", vllm([f"E=256,N=512,{FLAT8}"], tensor_parallel_size=1, data_parallel_size=4), SHARED, ["--tp 4"]),
    ("vllm spread", vllm([f"E=32,N=2048,{FLAT8}"], tensor_parallel_size=2, data_parallel_size=4,
     enable_expert_parallel=True), SHARED, ["--tp 2", "--ep 8"]),
    ("vllm spread, on one GPU", vllm([f"E=256,N=2048,{FLAT8}"], tensor_parallel_size=1, enable_expert_parallel=True),
     SHARED, ["--tp 1"]),
    ("vllm refined", vllm(["E=256,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[64,64].json"],
     tensor_parallel_size=32), SHARED, ["--tp 32"]),
    ("vllm online blocks", vllm([f"E=64,N=128,{FLAT8}"], quantization="fp8_per_block"), BF16, ["--block-shape"]),
    ("another model than was given", sglang(["E=40,N=96,device_name=NVIDIA_H200.json"]), BF16,
     ["--experts 40", "--intermediate 96"]),
]  # fmt: skip


@pytest.mark.parametrize(("log", "model", "words"), [s[1:] for s in SERVERS], ids=[s[0] for s in SERVERS])
def test_the_command_for_a_log_and_a_model(run: Run, tmp_path: Path, log: str, model: Path, words: list[str]) -> None:
    path = tmp_path / "server.log"
    path.write_text(log)
    done = run("doctor", "--log", path, "--model", model)
    commands = [c for c in printed(done.stdout) if c.startswith("moeopt tune")]
    assert all(any(word in command for command in commands) for word in words), done.stdout
    names = [planned(run, command)[0] for command in commands]
    assert names == asked(path)


@pytest.mark.parametrize("log", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
@pytest.mark.parametrize("model", [None, BF16, SHARED], ids=["no model", "bf16", "shared"])
def test_every_log_of_the_tests(run: Run, log: Path, model: Path | None) -> None:
    """Whatever model is given: where it is not that of the log, the numbers of the name count."""
    given = ["--model", model] if model is not None else []
    done = run("doctor", "--log", log, *given)
    commands = [c for c in printed(done.stdout) if c.startswith("moeopt tune")]
    for command, name in zip(commands, asked(log), strict=False):
        there = SHARED if "block_shape" in name else BF16
        known = {"--model /m ": f"--model {there} ", "--model model ": f"--model {there} "}
        found = ConfigName.parse(planned(run, command, **known)[0])
        assert replace(found, device="") == replace(ConfigName.parse(name, found.engine), device="")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("options", "model"),
    [
        (["--tp", "8"], BF16),
        (["--tp", "8", "--ep", "8"], SHARED),
        (["--tp", "4", "--no-fuse-shared"], SHARED),
        (["--tp", "2", "--dtype", "fp8_w8a8", "--block-shape", "128,128"], BF16),
        (["--tp", "2", "--dtype", "fp8_w8a8", "--per-channel"], BF16),
        (["--experts", "12", "--intermediate", "96"], BF16),
    ],
)
def test_the_command_for_a_directory(run: Run, tmp_path: Path, engine: str, options: list[str], model: Path) -> None:
    """What was given reaches the command."""
    (tmp_path / "empty").mkdir()
    done = run("doctor", "--config-dir", "empty", "--engine", engine, "--model", model, *options, "--gpu", H200,
               "--triton", "3.6.0")  # fmt: skip
    (command,) = [c for c in printed(done.stdout) if c.startswith("moeopt tune")]
    run(
        "plan", "--engine", engine, "--model", model, *options, "--gpu", "H200", "--triton", "3.6.0", "--json", "p.json"
    )
    wanted = [Path(f).name for f in json.loads(Path("p.json").read_text())["files"][engine]]
    assert planned(run, command) == wanted
    assert wanted[0] in done.stdout


def test_a_draft_model_beside_its_target(run: Run, tmp_path: Path) -> None:
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({**json.loads(BF16.read_text()), "moe_intermediate_size": 512, "num_experts": 16}))
    log = tmp_path / "server.log"
    names = [f"E=257,N=256,{FP8}", "E=16,N=64,device_name=NVIDIA_H200.json"]
    log.write_text(sglang(names, speculative_draft_model_path=str(draft)))
    done = run("doctor", "--log", log, "--model", SHARED)
    commands = [c for c in printed(done.stdout) if c.startswith("moeopt tune")]
    assert [f"--model {model} " in c for model, c in zip((SHARED, draft), commands, strict=True)] == [True, True]
    assert [planned(run, c)[0] for c in commands] == names


@pytest.mark.parametrize(
    "said",
    [
        {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2, "model": "/draft"}},
        "speculative_config=SpeculativeConfig(method='eagle', model='/draft', num_spec_tokens=2)",
    ],
)
def test_a_draft_of_vllm_beside_a_target_that_is_not_here(run: Run, tmp_path: Path, said: str | dict[str, Any]) -> None:
    log = tmp_path / "server.log"
    names = [f"E=256,N=256,{FLAT8}", "E=16,N=64,device_name=NVIDIA_H200.json"]
    text = vllm(names, **(said if isinstance(said, dict) else {}))
    log.write_text(text.replace("config: ", f"config: {said}, ") if isinstance(said, str) else text)
    commands = [c for c in printed(run("doctor", "--log", log).stdout) if c.startswith("moeopt tune")]
    assert [c.split()[3] for c in commands] == ["/m", "/draft"]


def test_without_a_draft_every_layer_is_the_models(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(vllm([f"E=256,N=256,{FLAT8}"], speculative_config={"method": "ngram", "num_speculative_tokens": 2}))
    (command,) = [c for c in printed(run("doctor", "--log", log).stdout) if c.startswith("moeopt tune")]
    assert command.split()[3] == "/m"


def test_a_layout_that_the_log_tells_is_no_other_shape(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(sglang(["E=64,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8.json"], quantization="fp8"))
    assert "The shape that was given" not in run("doctor", "--log", log, "--model", BF16).stdout
    assert "The shape that was given" in run("doctor", "--log", log, "--model", SHARED).stdout


def test_the_start_keeps_how_the_model_is_laid_out(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(sglang([f"E=36,N=2048,{FP8}"], ep_size=8, ep_num_redundant_experts=32, quantization="fp8",
                          moe_runner_backend="triton"))  # fmt: skip
    start = printed(run("doctor", "--log", log).stdout)[-1]
    for words in ("--tp 8", "--ep-size 8", "--ep-num-redundant-experts 32", "--quantization fp8",
                  "--moe-runner-backend triton"):  # fmt: skip
        assert words in start
    log.write_text(vllm([f"E=32,N=2048,{FLAT8}"], tensor_parallel_size=1, data_parallel_size=8,
                        enable_expert_parallel=True))  # fmt: skip
    start = printed(run("doctor", "--log", log).stdout)[-1]
    assert "--tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel" in start
