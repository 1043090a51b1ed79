"""The engines' own loaders, as published, read exactly what was exported."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import DEFAULT_BATCH_SIZES, MoEShape
from moeopt.core.table import ConfigTable
from moeopt.doctor.scan import scan
from moeopt.doctor.verdict import judge_log
from moeopt.export import ConfigName, export_configs, find_config_files
from moeopt.export.names import nearest_key
from tests.wheels import SGLANG, VLLM, engine_source

logger = logging.getLogger(__name__)
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


def ask(engine: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the engine's loader answers and logs, for each job as if it were a fresh server."""
    tree = engine_source(engine, SGLANG if engine == "sglang" else VLLM)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_loader.py")), engine, str(tree)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def job(
    engine: str, directory: Path, device: str, shapes: Iterable[MoEShape], largest: int = LARGEST
) -> dict[str, Any]:
    """A server that reads from a directory."""
    return {
        "device": device,
        "triton_version": DEVICES[device],
        "environment": {engines.get(engine).variable: str(directory)},
        "largest": LARGEST,
        "queries": [query(shape) for shape in shapes],
    }


def doctor(answer: dict[str, Any]) -> str:
    """The doctor's verdict on the very lines that the engine logged."""
    return judge_log(scan(io.BytesIO("\n".join(text for _, text, _ in answer["log"]).encode()))).code


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


def expected(
    up: dict[int, LaunchConfig], down: dict[int, LaunchConfig] | None, more: dict[str, int] | None = None
) -> list[list[Any]]:
    """Where the answer changes, from M = 1 on; ``more`` is what each entry holds beside the config."""
    more = more or {}
    keys = sorted(up)
    runs: list[list[Any]] = []
    for m in range(1, LARGEST + 1):
        key = nearest_key(keys, m)
        answer = [{**up[key].to_dict(), **more}, {**(down or up)[key].to_dict(), **more}]
        if not runs or runs[-1][1] != answer:
            runs.append([m, answer])
    return runs


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engine_reads_exactly_what_was_exported(engine: str, tmp_path: Path) -> None:
    jobs, wanted, paths = [], [], []
    for device in DEVICES:
        # vLLM reads the bf16 file for int8: one file for both cannot be checked in one directory.
        shapes = {name: shape for name, shape in SHAPES.items() if engine == "sglang" or name != "int8"}
        directory = tmp_path / device
        expect, written = [], []
        for seed, shape in enumerate(shapes.values()):
            up, down = tuned(shape, seed, split=engine == "sglang" and seed % 2 == 0)
            written += export_configs(engine, directory, shape, device, DEVICES[device], ConfigTable.of(up, down))
            # vLLM's launch for integer weights and 16-bit activations takes SPLIT_K from the file.
            grouped = engine == "vllm" and shape.dtype in ("int4_w4a16", "int8_w8a16")
            expect.append(expected(up, down, {"SPLIT_K": 1} if grouped else None))
        jobs.append(job(engine, directory, device, shapes.values()))
        wanted.append(expect)
        paths.append(written)
    checked = 0
    for answer, expect, written in zip(ask(engine, jobs), wanted, paths, strict=True):
        for name, got, want in zip(shapes, answer["layers"], expect, strict=False):
            assert got == want, name
            checked += LARGEST
        assert [(level, text) for level, text, _ in answer["log"] if level not in ("INFO", "DEBUG")] == []
        named = "\n".join(text for _, text, _ in answer["log"])
        assert all(str(path) in named for path in written)
        assert doctor(answer) == "tuned"
    files = sum(map(len, paths))
    logger.info("%s: %s pairs of (layer, M) read as exported, no warning, from %d files", engine, f"{checked:,}", files)


def test_what_sglang_does_without_the_exact_files(tmp_path: Path) -> None:
    shape, device = SHAPES["bf16"], "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    old, old_down = tuned(shape, 1, split=True)
    new, _ = tuned(shape, 2, split=False)
    cases = ("nothing", "joint", "stale_down", "up_alone", "old")
    for case in cases:
        (tmp_path / case / "configs").mkdir(parents=True)
    for case in ("joint", "stale_down", "old"):
        export_configs("sglang", tmp_path / case, shape, device, "3.5.1", ConfigTable.of(old, old_down))
    for case in ("joint", "stale_down", "up_alone"):
        _, down = export_configs("sglang", tmp_path / case, shape, device, "3.6.0", ConfigTable.of(new))
        if case != "joint":
            down.unlink()
    answers = ask("sglang", [job("sglang", tmp_path / case, device, [shape]) for case in cases])
    answer = dict(zip(cases, answers, strict=True))
    # Why joint mode writes a down file, too: without it SGLang takes one of another Triton version.
    assert answer["joint"]["layers"] == answer["up_alone"]["layers"] == [expected(new, None)]
    assert answer["stale_down"]["layers"] not in ([expected(new, None)], [expected(old, old_down)])
    assert answer["old"]["layers"] == [expected(old, old_down)]
    # The doctor reads the engine's own lines, and its lookup finds what the engine found.
    assert {case: doctor(answer[case]) for case in cases} == {
        "nothing": "default",
        "joint": "tuned",
        "stale_down": "fallback",
        "up_alone": "down_reuses_up",
        "old": "fallback",
    }
    name = ConfigName.of("sglang", shape, device)
    found = {case: find_config_files("sglang", tmp_path / case, name, "3.6.0") for case in cases}
    assert {case: (f.up.how, f.down.how) for case, f in found.items()} == {
        "nothing": ("missing", "missing"),
        "joint": ("exact", "exact"),
        "stale_down": ("exact", "fallback"),
        "up_alone": ("exact", "up_file"),
        "old": ("fallback", "fallback"),
    }


def test_vllm_without_a_file_and_its_int8(tmp_path: Path) -> None:
    shape, device = SHAPES["int8"], "NVIDIA H200 NVL"
    up, _ = tuned(shape, 5, split=False)
    (path,) = export_configs("vllm", tmp_path / "int8", shape, device, "3.7.1", ConfigTable.of(up))
    assert "dtype" not in path.name and "NVIDIA_H200.json" in path.name
    int8, nothing = ask(
        "vllm", [job("vllm", tmp_path / "int8", device, [shape]), job("vllm", tmp_path / "no", device, [SHAPES["fp8"]])]
    )
    assert int8["layers"] == [expected(up, None)]
    assert (doctor(int8), doctor(nothing)) == ("tuned", "default")
