"""The config files that SGLang and vLLM ship for GPUs of compute capability 12, with the layers they are for.

A file's name holds experts and intermediate size; the hidden size and top_k are those of the models that
have such layers (their published config.json): GLM-4.5-Air, GLM-4.5/4.6, Qwen3-30B-A3B, Qwen3.5-35B-A3B,
Qwen3-Next-80B-A3B, MiniMax-M2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GPUS, GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.export import ConfigName
from tests.wheels import SGLANG, VLLM, engine_source

# (experts, intermediate size) -> (hidden size, top_k)
_LAYERS = {
    (129, 352): (4096, 9),
    (129, 704): (4096, 9),
    (128, 704): (4096, 8),
    (161, 384): (5120, 9),
    (161, 192): (5120, 9),
    (20, 1536): (5120, 8),
    (128, 768): (2048, 8),
    (256, 512): (2048, 8),
    (512, 512): (2048, 10),
    (256, 384): (3072, 8),
    (64, 1536): (3072, 8),
}
_EXPERT_PARALLEL = {(20, 1536): 8, (64, 1536): 4}


@dataclass(frozen=True)
class ShippedFile:
    """One shipped file."""

    engine: str
    path: Path
    role: str
    gpu: GpuSpec
    shape: MoEShape
    configs: dict[int, LaunchConfig]

    @property
    def label(self) -> str:
        return f"{self.engine} {self.path.parent.name}/{self.path.name}"


def shipped_files() -> Iterator[ShippedFile]:
    """All of them, fetched once."""
    for engine, release in (("sglang", SGLANG), ("vllm", VLLM)):
        for path in sorted((engine_source(engine, release) / engine).rglob("configs/**/E=*.json")):
            gpu = next((g for g in GPUS.values() if g.sm in (120, 121) and _device(g) in path.name), None)
            if gpu is None:
                continue
            name = ConfigName.parse(path.name, engine)
            sizes = (name.num_experts, name.intermediate_size)
            hidden, top_k = _LAYERS[sizes]
            shape = MoEShape(
                name.num_experts, top_k, hidden, name.intermediate_size, name.dtype or "bf16", name.block_shape,
                per_channel=name.per_channel, ep_size=_EXPERT_PARALLEL.get(sizes, 1),
            )  # fmt: skip
            entries = json.loads(path.read_text())
            configs = {
                int(m): LaunchConfig.from_dict(_as_run(engine, shape, entry))
                for m, entry in entries.items()
                if m.isdigit()
            }
            yield ShippedFile(engine, path, "down" if name.down else "up", gpu, shape, configs)


def _as_run(engine: str, shape: MoEShape, entry: dict[str, Any]) -> dict[str, Any]:
    """vLLM cuts BLOCK_SIZE_K down to block_k."""
    if engine != "vllm" or shape.block_shape is None:
        return entry
    return {**entry, "BLOCK_SIZE_K": min(entry["BLOCK_SIZE_K"], shape.block_shape[1])}


def _device(gpu: GpuSpec) -> str:
    return f"device_name={gpu.name.replace(' ', '_')}"
