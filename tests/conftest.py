"""Fixtures that all tests share."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, which is nothing that a test should find.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

GRID = {
    "BLOCK_SIZE_M": (16, 32, 64),
    "BLOCK_SIZE_N": (32, 64, 128),
    "BLOCK_SIZE_K": (64, 128),
    "GROUP_SIZE_M": (1, 16),
    "num_warps": (4, 8),
    "num_stages": (2, 3),
}
BATCH_SIZES = (1, 16, 64)


# A shell starts what it puts in the background with SIGINT ignored, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a CUDA GPU run where there is one."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def synthetic_us(config: dict[str, int], role: str, m: int) -> float:
    """A smooth landscape with one optimum, that differs by role and batch size."""
    log = {key: math.log2(value) for key, value in config.items()}
    best_m = 4 + min(2, math.log2(m) / 3)
    cost = 1.0 + 0.08 * (log["BLOCK_SIZE_M"] - best_m) ** 2
    cost += 0.05 * (log["BLOCK_SIZE_N"] - (6 if role == "up" else 5)) ** 2
    cost += 0.02 * (log["BLOCK_SIZE_K"] - 7) ** 2 + 0.01 * log["GROUP_SIZE_M"] / 4
    cost += 0.03 * (config["num_warps"] == (8 if m < 32 else 4)) + 0.02 * (config["num_stages"] == 2)
    return (10 + m / 4) * (1.5 if role == "up" else 1.0) * cost


def write_tiny_recording(path: Path, **header: Any) -> Path:
    """Writes a small synthetic recording: 144 configs, 3 batch sizes, 5 replays each.

    Configs of 128 columns and 3 stages with 8 warps are compile errors; those with 128 x 128 tiles of
    64 rows and 3 stages are out of resources. Keyword arguments replace header fields.
    """
    head = {
        "format": "moe-landscape/1",
        "kernel": "builtin 0.1.0",
        "kernel_hash": "0123456789abcdef",
        "shape": {
            "num_experts": 8,
            "top_k": 2,
            "hidden_size": 256,
            "intermediate_size": 128,
            "dtype": "bf16",
            "block_shape": None,
        },
        "gpu": {"name": "NVIDIA H200", "compute_capability": [9, 0]},
        "versions": {"triton": "3.6.0", "torch": "2.11.0"},
        "timing": "synthetic",
        "space": {key: list(values) for key, values in GRID.items()},
        "roofline_us": {
            role: {str(m): 0.9 * (10 + m / 4) * (1.5 if role == "up" else 1.0) for m in BATCH_SIZES}
            for role in ("up", "down")
        },
        "complete": True,
        **header,
    }
    lines = [json.dumps(head)]
    for values in itertools.product(*GRID.values()):
        config = dict(zip(GRID, values, strict=True))
        row: dict[str, Any] = {"config": config, "status": "ok", "compile_s": 0.5}
        if config["BLOCK_SIZE_N"] == 128 and config["num_stages"] == 3 and config["num_warps"] == 8:
            row = {"config": config, "status": "compile_error", "error": "PassManager::run failed"}
        elif config["BLOCK_SIZE_M"] == 64 and config["BLOCK_SIZE_N"] == 128 and config["num_stages"] == 3:
            row = {"config": config, "status": "out_of_resources", "error": "shared memory"}
        else:
            for role in ("up", "down"):
                row[role] = {"registers": 64, "spills": 0, "shared_bytes": 8192, "relative_error": 0.0017}
                row[role]["us"] = {
                    str(m): [round(synthetic_us(config, role, m) * (1 + 0.001 * i), 3) for i in range(5)]
                    for m in BATCH_SIZES
                }
        lines.append(json.dumps(row))
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


@pytest.fixture
def tiny_recording(tmp_path: Path) -> Callable[..., Path]:
    """Calls :func:`write_tiny_recording` in the test's directory."""
    return lambda name="tiny.jsonl.gz", **header: write_tiny_recording(tmp_path / name, **header)
