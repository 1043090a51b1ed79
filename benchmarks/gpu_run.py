"""What the GPU benchmarks share: facts about the machine, compiling ahead, tables, result files."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.kernels.base import MoEKernel

RESULTS = Path(__file__).parent / "results"


def machine_facts(gpu: GpuSpec | None) -> dict[str, Any]:
    """GPU, cores, versions and commit: what a result is worth nothing without."""
    git = shutil.which("git")
    describe = [git, "describe", "--always", "--dirty"] if git else ["true"]
    commit = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return {
        "gpu": gpu.name if gpu else None,
        "compute_capability": list(gpu.compute_capability) if gpu else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("moeopt", "triton", "torch", "numpy")},
        # Where the tree is a copy without its history, or inside another one, the commit is told.
        "commit": os.environ.get("MOEOPT_COMMIT") or commit.strip() or None,
    }


@dataclass(frozen=True)
class Binary:
    """What one launch needs compiled."""

    kernel: MoEKernel
    shape: MoEShape
    role: Role
    batch_size: int
    config: LaunchConfig

    def compile(self, capability: tuple[int, int]) -> str | None:
        """Fills Triton's cache. Returns one line if it cannot be compiled."""
        from moeopt.kernels.target import cross_target

        try:
            with cross_target(capability):
                self.kernel.compile(self.shape, self.role, self.batch_size, self.config)
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises; it is shown
            message = " ".join(str(error).split())[:200]
            return f"{self.kernel.key.name} {self.shape.slug()} {self.role} {self.config}: {message}"
        return None


def compile_ahead(binaries: Iterable[Binary], capability: tuple[int, int]) -> list[str]:
    """Compiles in all cores, so that the launches find their binaries in Triton's cache.

    Returns:
        One line for each binary that could not be made.
    """
    distinct = {
        (b.kernel.key, b.shape, b.role, b.config, b.kernel.specialisation(b.shape, b.role, b.batch_size)): b
        for b in binaries
    }
    lines = joblib.Parallel(n_jobs=-1)(joblib.delayed(b.compile)(capability) for b in distinct.values())
    return [line for line in lines if line]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes the result, its directory too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
