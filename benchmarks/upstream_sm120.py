"""What SGLang and vLLM ship for SM120 parts, held against the rule, the compiler and the cost model.

    python -m benchmarks.upstream_sm120 --compile --json benchmarks/results/upstream-sm120.json

The files are those of the published wheels (fetched once by pip). Of each file:

- configs that the rule of moeopt/resources.py calls illegal for the file's layer;
- with --compile, what becomes of each in the compiler, with the engine's own kernel, for the projections
  that the file is used for. Each binary is compiled once: Triton's cache tells what a binary depends on;
- for each batch size the share of the legal grid that the cost model predicts to be faster than upstream's
  choice (0 % is the model's own first), and the same for the engine's default.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compile_grid import PatientPool
from benchmarks.costmodel import commit
from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.limits import illegal_reason
from moeopt.core.shape import ROLES, Role
from moeopt.core.space import SearchSpace
from moeopt.costmodel.model import predict_us
from moeopt.kernels.base import MoEKernel
from moeopt.kernels.sglang import SglangKernel
from moeopt.kernels.vllm import VllmKernel
from tests.sm120_files import ShippedFile, shipped_files
from tests.wheels import SGLANG, VLLM, engine_source


@dataclass
class Upstream:
    """What was found about one file.

    Attributes:
        file: Engine, folder and name.
        shape: The layer that it is for.
        configs: Entries of the file.
        illegal: Entries that the rule refuses, with its reason.
        places: Per batch size, the share of the legal grid predicted faster than the file's choice.
        default_places: The same of the engine's default.
        failed: Entries that do not compile, with the compiler's message.
        binaries: Distinct binaries that its entries need; shared ones count in each file.
        local_memory: Of them, those that keep registers in local memory.
    """

    file: str
    shape: str
    configs: int
    illegal: list[str] = field(default_factory=list)
    places: dict[int, float] = field(default_factory=dict)
    default_places: dict[int, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    binaries: int = 0
    local_memory: int = 0


def roles_of(file: ShippedFile) -> tuple[Role, ...]:
    """The projections that a file is used for."""
    if file.role == "down":
        return ("down",)
    return ("up",) if file.path.with_name(file.path.stem + "_down.json").exists() else ROLES


def engine_kernel(engine: str) -> MoEKernel:
    """The kernel of the published wheel."""
    if engine == "sglang":
        return SglangKernel(engine_source("sglang", SGLANG))
    return VllmKernel(engine_source("vllm", VLLM))


def illegal(file: ShippedFile, kernel: MoEKernel) -> list[str]:
    """Entries that the rule or the kernel refuses."""
    return [
        f"M={m}: {config}: {reason}"
        for m, config in sorted(file.configs.items())
        for role in roles_of(file)
        if (reason := kernel.illegal_reason(config, file.shape, role, file.gpu))
    ]


def places(file: ShippedFile) -> tuple[dict[int, float], dict[int, float]]:
    """Per batch size, the place of upstream's choice and of the engine's default in the predicted order."""
    legal = [c for c in SearchSpace.grid(file.shape).configs() if illegal_reason(c, file.shape, "up", file.gpu) is None]

    def predicted(m: int, configs: Sequence[LaunchConfig]) -> np.ndarray:
        return np.sum([predict_us(file.shape, file.gpu, role, m, configs) for role in roles_of(file)], axis=0)

    shipped, default = {}, {}
    for m, config in sorted(file.configs.items()):
        us = predicted(m, legal)
        shipped[m] = float(np.mean(us < predicted(m, [config])[0]))
        default[m] = float(
            np.mean(us < predicted(m, [engines.get(file.engine).default_config(file.shape, m, file.gpu)])[0])
        )
    return shipped, default


def compile_files(
    files: Sequence[ShippedFile], cache_dir: Path, workers: int | None, keep: int | None = None
) -> tuple[dict[str, tuple[list[str], int, int]], int]:
    """Compiles what the files hold with their engines' kernels.

    Args:
        files: Of :func:`shipped_files`.
        cache_dir: Triton's cache, which all share: a binary that is there is not compiled again.
        workers: Compile processes.
        keep: Only so many (config, projection) of each engine and scheme, evenly drawn; None for all.

    Returns:
        Per label (failures, distinct binaries, those with local memory), and the distinct binaries of all.
    """
    found: dict[str, tuple[list[str], int, int]] = {}
    every: set[str] = set()
    wanted = _wanted(files, keep)
    for file in files:
        failed: list[str] = []
        binaries: dict[str, bool] = {}
        if not wanted.get(file.label):
            found[file.label] = ([], 0, 0)
            continue
        kernel = engine_kernel(file.engine)
        with PatientPool(kernel, file.shape, file.gpu.compute_capability, workers, cache_dir) as pool:
            futures = [(m, config, role, pool.submit(config, role, m)) for m, config, role in wanted[file.label]]
            for m, config, role, future in futures:
                compiled = future.result()
                if compiled.failure is not None or compiled.resources is None:
                    failed.append(f"M={m} {role}: {config}: {compiled.failure and compiled.failure.message}")
                    continue
                need = compiled.resources.shared_bytes
                if need > file.gpu.shared_memory_per_block_optin:
                    failed.append(f"M={m} {role}: {config}: {need} bytes of shared memory")
                binary = next(path for name, path in compiled.files.items() if name.endswith(".cubin"))
                binaries[binary] = compiled.resources.spills > 0
        every |= set(binaries)
        found[file.label] = (failed, len(binaries), sum(binaries.values()))
    return found, len(every)


def _wanted(files: Sequence[ShippedFile], keep: int | None) -> dict[str, list[tuple[int, LaunchConfig, Role]]]:
    """(batch size, config, projection) per label: each config and projection of an engine's scheme once."""
    schemes: dict[tuple[Any, ...], dict[tuple[Any, ...], tuple[str, int]]] = {}
    for file in files:
        scheme = (file.engine, file.gpu.sm, file.shape.dtype, file.shape.block_shape, file.shape.per_channel)
        entries = schemes.setdefault(scheme, {})
        for m, config in sorted(file.configs.items()):
            for role in roles_of(file):
                # With all of them, each layer counts: what is the same binary is found in the cache.
                layer = file.shape if keep is None else None
                entries.setdefault((config, role, layer), (file.label, m))
    wanted: dict[str, list[tuple[int, LaunchConfig, Role]]] = {}
    for entries in schemes.values():
        chosen = sorted(entries, key=str)
        if keep is not None:
            chosen = chosen[:: max(1, -(-len(chosen) // keep))]
        for key in chosen:
            label, m = entries[key]
            wanted.setdefault(label, []).append((m, key[0], key[1]))
    return wanted


def summary(values: Sequence[float]) -> dict[str, float]:
    """Percentiles of places."""
    quarter, half, most = np.percentile(values, [25, 50, 90])
    within = {f"within_first_{share}_percent": float(np.mean(np.array(values) <= share / 100)) for share in (5, 10, 50)}
    found = {"cells": len(values), "quartile": quarter, "median": half, "90th_percentile": most, **within}
    return {name: round(float(value), 4) for name, value in found.items()}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile everything, too")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/upstream-sm120"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files, begin = list(shipped_files()), time.monotonic()
    compiled, distinct = compile_files(files, options.cache_dir, options.workers) if options.compile else ({}, 0)
    rows = []
    for file in files:
        shipped, default = places(file)
        failed, binaries, local = compiled.get(file.label, ([], 0, 0))
        refused = illegal(file, engine_kernel(file.engine))
        shape = file.shape.slug()
        rows.append(Upstream(file.label, shape, len(file.configs), refused, shipped, default, failed, binaries, local))
        print(f"{file.label}\n   illegal {len(refused)}, failed {len(failed)}, binaries {binaries}")
        print("   " + " ".join(f"{m}:{100 * place:.0f}%" for m, place in shipped.items()))
        for line in (*refused, *failed):
            print(f"   BROKEN {line}")
    every = summary([place for row in rows for place in row.places.values()])
    defaults = summary([place for row in rows for place in row.default_places.values()])
    print(f"upstream's choices: {every}\nthe engine's defaults: {defaults}")
    if options.compile:
        print(f"{distinct} distinct binaries, {sum(len(row.failed) for row in rows)} entries failed")
    if options.json is not None:
        content = {
            "engines": {"sglang": SGLANG, "vllm": VLLM},
            "triton": version("triton"),
            "commit": commit(),
            "seconds": round(time.monotonic() - begin),
            "entries": sum(row.configs for row in rows),
            "illegal": sum(len(row.illegal) for row in rows),
            "failed": sum(len(row.failed) for row in rows) if options.compile else None,
            "distinct_binaries": distinct if options.compile else None,
            "places": every,
            "default_places": defaults,
            "files": [
                {
                    **vars(row),
                    "places": {m: round(place, 4) for m, place in row.places.items()},
                    "default_places": {m: round(place, 4) for m, place in row.default_places.items()},
                }
                for row in rows
            ],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    # The workers import the pool's module by its name.
    from benchmarks import upstream_sm120

    upstream_sm120.main()
