"""``moeopt plan`` for the deployments that the study files are for, on a machine without any GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeopt.cli import build_app
from tests.cli.conftest import Run

STUDIES = Path(__file__).parents[2] / "studies"
RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def plan(*args: str) -> str:
    done = CliRunner().invoke(build_app(), ["plan", *args])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("study", "gpu", "slug", "legal", "file"),
    [
        (
            "glm-5-tp8-rtx-pro-6000",
            RTX_PRO,
            "E257-top9-K6144-N256-fp8_w8a8-b128x128-shared1",
            "1128 of 1280",
            "E=257,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition,dtype=fp8_w8a8,"
            "block_shape=[128, 128].json",
        ),
        (
            "qwen3.5-122b-a10b-tp4",
            RTX_PRO,
            "E256-top8-K3072-N256-bf16",
            "976 of 1920",
            "E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition_down.json",
        ),
        (
            "qwen3-30b-a3b-fp8-rtx-5090",
            "NVIDIA GeForce RTX 5090",
            "E128-top8-K2048-N768-fp8_w8a8-b128x128",
            "1128 of 1280",
            "E=128,N=768,device_name=NVIDIA_GeForce_RTX_5090,dtype=fp8_w8a8,block_shape=[128, 128].json",
        ),
        (
            "qwen3-next-80b-a3b-fp8-gb10",
            "NVIDIA GB10",
            "E512-top10-K2048-N512-fp8_w8a8-b128x128",
            "1128 of 1280",
            "E=512,N=512,device_name=NVIDIA_GB10,dtype=fp8_w8a8,block_shape=[128, 128].json",
        ),
    ],
)
def test_study_files(study: str, gpu: str, slug: str, legal: str, file: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = plan(str(STUDIES / f"{study}.toml"), "--gpu", gpu, "--triton", "3.6.0", "--json", str(out))
    assert f"{slug} on {gpu}" in text
    assert legal in text
    assert f"configs/triton_3_6_0/{file}" in text
    made = json.loads(out.read_text())
    assert made["least_memory_bytes"] <= made["memory_bytes"]
    # With all binaries there, timing is left.
    assert 0 < made["estimated_seconds_compiled_before"] < made["estimated_seconds"]
    assert "if moeopt compile has filled Triton's cache before" in text
    assert "estimates, not measured" in text


def test_unified_memory_is_not_promised(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    study = str(STUDIES / "qwen3-next-80b-a3b-fp8-gb10.toml")
    text = plan(study, "--gpu", "NVIDIA GB10", "--json", str(out))
    assert "128 GiB" not in text
    assert "shares with its host" in text
    assert "for each of the compile processes" in text
    assert json.loads(out.read_text())["memory_shared_with_host"] is True
    assert "of the GPU's 32 GiB" in plan(study, "--gpu", "NVIDIA GeForce RTX 5090")


def test_what_does_not_fit_is_said() -> None:
    shape = ("--experts", "512", "--top-k", "8", "--hidden", "8192", "--intermediate", "4096", "--dtype", "bf16")
    text = plan(*shape, "--gpu", "NVIDIA GeForce RTX 5090")
    assert "more than the GPU's 32 GiB" in text


X1 = (
    'name = "NVIDIA X1"\ncompute_capability = 12.0\nmultiprocessors = 156\nmemory_bytes = "84GiB"\n'
    'l2_bytes = "112MiB"\n'
    "bandwidth_gbps = 1344\nbf16_tflops = 400\nfp8_tflops = 800\n"
)
SHAPE = ("--experts", "8", "--top-k", "2", "--hidden", "512", "--intermediate", "256", "--dtype", "bf16")


@pytest.mark.parametrize("command", ["plan", "suggest", "compile"])
def test_a_gpu_by_hand_and_a_near_miss(run: Run, tmp_path: Path, command: str) -> None:
    """What is refused is refused before anything is written; what is taken names the files."""
    first = ("suggest", "out") if command == "suggest" else (command,)
    for gpu, said in (
        ("rtx pro 6000", "did you mean NVIDIA RTX PRO 6000 Blackwell Server Edition or "),
        ("no.toml", "no.toml: the GPU's file cannot be read"),
        ("name=X,cores=12", "GPU key 'cores' is unknown"),
    ):
        done = run(*first, *SHAPE, "--gpu", gpu)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
    if command != "compile":
        (tmp_path / "x1.toml").write_text(X1)
        done = run(*first, *SHAPE, "--gpu", "x1.toml", "--batch-sizes", "8")
        assert done.returncode == 0, done.stderr
        assert "device_name=NVIDIA_X1" in done.stdout
        by_hand = ",".join(line.replace('"', "") for line in X1.splitlines())
        assert run(command, *(["other"] if command == "suggest" else []), *SHAPE, "--gpu", by_hand).returncode == 0


def test_one_compile_process_is_said_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, said in ((2, "with 1 compile process,"), (8, "with 7 compile processes,")):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert said in plan(*SHAPE, "--gpu", "NVIDIA H200")
