"""What every adapter is checked for on published engines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.kernels.engine import EngineKernel
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.target import cross_target

ROOT = Path(__file__).resolve().parents[2]
GPUS = {
    (9, 0): GpuSpec.by_name("NVIDIA H200"),
    (12, 0): GpuSpec.by_name("NVIDIA RTX PRO 6000 Blackwell Server Edition"),
}
COMPILED = {
    "bf16": MoEShape(32, 4, 256, 128),
    "fp8 block": MoEShape(32, 4, 256, 128, "fp8_w8a8", (128, 128)),
    "int4": MoEShape(32, 4, 256, 128, "int4_w4a16", group_size=64),
}


def check_compiles(kernel: EngineKernel, shape: MoEShape, capability: tuple[int, int], *, shared: int) -> None:
    """Both roles compile, fit what was foretold, and real operands meet the binary that is already there."""
    gpu = GPUS[capability]
    config = LaunchConfig(32, 64, 64, 8, 4, 3)
    kernel.check(shape, gpu)
    layer = make_layer(shape, device="cpu", seed=0)
    for role in ROLES:
        assert kernel.illegal_reason(config, shape, role, gpu) is None
        with cross_target(capability):
            resources = kernel.compile(shape, role, 4, config)
            assert shared <= resources.shared_bytes <= shared + 1024
            assert 16 <= resources.registers <= 255
            assert kernel.compile(shape, role, 4, config).compile_s == 0
            batch = make_batch(layer, role, torch.arange(16).view(4, 4), seed=0)
            out = torch.empty(16, shape.output_rows(role), dtype=torch.bfloat16)
            compiled = kernel.launch(layer, role, batch, config, out, capability).warmup()
        assert compiled.hash == with_meta(kernel, shape, role, capability, config).hash


def with_meta(
    kernel: EngineKernel, shape: MoEShape, role: Role, capability: tuple[int, int], config: LaunchConfig
) -> object:
    """What the operands without memory compile to."""
    with cross_target(capability):
        return kernel.meta_launch(shape, role, 4, config, capability).warmup()


def check_interpreted(engine: str, source: Path, cases: Iterable[str], tmp_path: Path) -> None:
    """Runs the engine's kernel on the CPU through the kernels' suite."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "results"]
    given = {"ENGINE": engine, "PATH": str(source), "CASES": ",".join(cases)}
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env |= {f"MOEOPT_INTERPRETED_{name}": value for name, value in given.items()}
    run = subprocess.run(
        [*command, "tests/kernels/interpreted.py"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and f"{2 * len(list(cases))} passed" in run.stdout, run.stdout[-2000:]
