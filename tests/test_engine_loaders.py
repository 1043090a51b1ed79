"""The engines' own loaders, as published, read exactly what was exported."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import SGLANG, VLLM, engine_source

from moeopt.export import Engine, export_configs
from moeopt.export.names import nearest_key
from moeopt.shape import DEFAULT_BATCH_SIZES, MoEShape
from moeopt.space import LaunchConfig

pytestmark = [pytest.mark.network, pytest.mark.slow]

LARGEST = 8192
SHAPES = {
    "bf16": MoEShape(256, 8, 3072, 256),
    "block fp8": MoEShape(257, 9, 6144, 256, "fp8_w8a8", (128, 128), shared_experts=1),
    "fp8": MoEShape(128, 4, 2880, 720, "fp8_w8a8"),
    "channel fp8": MoEShape(160, 8, 5120, 192, "fp8_w8a8", per_channel=True),
    "int8": MoEShape(64, 6, 2048, 352, "int8_w8a8"),
    "int8 block": MoEShape(32, 8, 7168, 2048, "int8_w8a8", (128, 128), ep_size=8),
    "int8 weights": MoEShape(60, 4, 2048, 704, "int8_w8a16", group_size=128),
    "int4": MoEShape(384, 8, 7168, 256, "int4_w4a16", group_size=32),
}
DEVICES = {
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "3.6.0",
    "NVIDIA H200 NVL": "3.7.1",
}


def ask(engine: Engine, job: dict[str, Any], **environment: str) -> dict[str, Any]:
    tree = engine_source(engine, SGLANG if engine == "sglang" else VLLM)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_loader.py")), engine, str(tree)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def query(shape: MoEShape) -> dict[str, Any]:
    """The layer's weights as the engines hold them: int4 packed in bytes along the reduction."""
    pack = 2 if shape.dtype == "int4_w4a16" else 1
    e, k, n = shape.num_experts, shape.hidden_size, shape.intermediate_size
    block = list(shape.block_shape) if shape.block_shape else [0, shape.group_size] if shape.group_size else None
    flag = None if shape.dtype in ("bf16", "fp16") else f"use_{shape.dtype}"
    return {
        "w1": [e, 2 * n, k // pack],
        "w2": [e, k, n // pack],
        "top_k": shape.top_k,
        "torch_dtype": "bfloat16",
        "flags": {flag: True} if flag else {},
        "block_shape": block,
        "per_channel": shape.per_channel,
    }


def tuned(shape: MoEShape, seed: int, *, split: bool) -> tuple[dict[int, LaunchConfig], dict[int, LaunchConfig] | None]:
    rng = random.Random(seed)

    def one(block_m: int) -> LaunchConfig:
        return LaunchConfig(
            block_m,
            rng.choice((32, 64, 128, 256)),
            rng.choice((32, 64, 128)),
            rng.choice((1, 8, 16)),
            rng.choice((2, 4, 8)),
            rng.choice((2, 3, 4)),
            rng.choice((0, 128)),
        )

    up = {m: one(rng.choice((16, 32, 64, 128))) for m in DEFAULT_BATCH_SIZES}
    return up, {m: one(config.block_size_m) for m, config in up.items()} if split else None


def expected(up: dict[int, LaunchConfig], down: dict[int, LaunchConfig] | None) -> list[list[Any]]:
    keys = sorted(up)
    runs: list[list[Any]] = []
    for m in range(1, LARGEST + 1):
        key = nearest_key(keys, m)
        answer = [up[key].to_dict(), (down or up)[key].to_dict()]
        if not runs or runs[-1][1] != answer:
            runs.append([m, answer])
    return runs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engine_reads_exactly_what_was_exported(engine: Engine, device: str, tmp_path: Path) -> None:
    queries, wanted, paths = [], [], []
    for seed, (name, shape) in enumerate(SHAPES.items()):
        if engine == "vllm" and name == "int8":
            continue  # it reads the bf16 file: see the next test
        up, down = tuned(shape, seed, split=engine == "sglang" and seed % 2 == 0)
        paths += export_configs(engine, tmp_path, shape, device, DEVICES[device], up, down)
        queries.append(query(shape))
        wanted.append(expected(up, down))
    variable = "SGLANG_MOE_CONFIG_DIR" if engine == "sglang" else "VLLM_TUNED_CONFIG_FOLDER"
    job = {"device": device, "triton_version": DEVICES[device], "largest": LARGEST, "queries": queries}
    answer = ask(engine, job, **{variable: str(tmp_path)})
    for name, got, want in zip(SHAPES, answer["answers"], wanted, strict=False):
        assert got == want, name
    loud = [(level, text) for level, text, _ in answer["log"] if level not in ("INFO", "DEBUG")]
    assert loud == []
    named = "\n".join(text for _, text, _ in answer["log"])
    assert all(str(path) in named for path in paths)


def test_vllm_reads_the_bf16_file_for_int8(tmp_path: Path) -> None:
    shape, device = SHAPES["int8"], "NVIDIA H200"
    up, _ = tuned(shape, 5, split=False)
    export_configs("vllm", tmp_path, shape, device, "3.6.0", up, None)
    job = {"device": device, "largest": LARGEST, "queries": [query(shape)]}
    assert ask("vllm", job, VLLM_TUNED_CONFIG_FOLDER=str(tmp_path))["answers"] == [expected(up, None)]


def test_the_harness_sees_a_missing_file(tmp_path: Path) -> None:
    """The test above can fail: without files both engines warn and take their defaults."""
    (tmp_path / "configs").mkdir()
    job = {"device": "NVIDIA L4", "triton_version": "3.6.0", "largest": 64, "queries": [query(SHAPES["bf16"])]}
    for engine, variable in (("sglang", "SGLANG_MOE_CONFIG_DIR"), ("vllm", "VLLM_TUNED_CONFIG_FOLDER")):
        log = ask(engine, job, **{variable: str(tmp_path)})["log"]  # type: ignore[arg-type]
        assert any(level == "WARNING" and "Config file not found" in text for level, text, _ in log)


def test_sglang_falls_back_and_reads_an_old_down_file_beside_a_new_up_file(tmp_path: Path) -> None:
    """Why joint mode writes a down file, too: without it SGLang takes one of another Triton version."""
    shape, device = SHAPES["bf16"], "NVIDIA H200"
    old, old_down = tuned(shape, 1, split=True)
    new, _ = tuned(shape, 2, split=False)
    export_configs("sglang", tmp_path, shape, device, "3.5.1", old, old_down)
    _, down = export_configs("sglang", tmp_path, shape, device, "3.6.0", new, None)
    job = {"device": device, "triton_version": "3.6.0", "largest": LARGEST, "queries": [query(shape)]}
    assert ask("sglang", job, SGLANG_MOE_CONFIG_DIR=str(tmp_path))["answers"] == [expected(new, None)]
    down.unlink()
    stale = ask("sglang", job, SGLANG_MOE_CONFIG_DIR=str(tmp_path))
    assert stale["answers"] != [expected(new, None)]
    assert any("Fallback to triton version 3.5.1" in text for _, text, _ in stale["log"])
