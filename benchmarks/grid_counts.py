"""How much of the published grid fits each architecture, and what became of it in the compiler.

    python -m benchmarks.grid_counts --sample 16 --out benchmarks/results/grid-counts

No GPU is touched. Three columns of numbers, for moeopt's own kernel and each (compute capability, scheme):

- legal: configs of the grid that fit by the rule of moeopt/resources.py. All of them, nothing sampled.
- shared memory: (tile, projection) compiled up to where shared memory is allocated, from
  tests/data/resources (benchmarks/compile_grid.py), and verdicts of the rule that the compiler refutes.
- binaries: configs compiled to the end for both projections. The whole legal grid where --surveys has such a
  file (``moeopt compile`` writes it) or studies/recordings a recording of moeopt's kernel on that GPU (of the same
  scheme, perhaps another layer), else --sample of them, picked evenly by hash; those that a deadline
  ended are compiled again where --sample is given, with 600 s each. They count apart from those that the
  compiler refused: on a busy machine a deadline says nothing of a config.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compile_grid import SHAPES, PatientPool
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import illegal_reason
from moeopt.core.shape import DEFAULT_BATCH_SIZES, ROLES, MoEShape
from moeopt.core.space import SearchSpace
from moeopt.errors import UnsupportedShapeError
from moeopt.kernels import get_kernel
from moeopt.kernels.base import MoEKernel
from moeopt.recordings.compile_sweep import TIMEOUT, CompileSweep

ROOT = Path(__file__).resolve().parents[1]
RESOURCES = ROOT / "tests" / "data" / "resources"
RECORDINGS = ROOT / "studies" / "recordings"
SCHEME = ("dtype", "block_shape", "per_channel", "group_size")
GPU_NAMES = (
    "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA GB10", "NVIDIA B200", "NVIDIA H200", "NVIDIA L40S",
    "NVIDIA A100-SXM4-80GB",
)  # fmt: skip
# GLM-5's layer, so that the study file's own survey counts.
LAYERS = SHAPES | {"fp8-block": MoEShape(257, 9, 6144, 256, "fp8_w8a8", (128, 128), shared_experts=1)}


@dataclass
class Counts:
    """Of one (GPU, scheme)."""

    gpu: str
    sm: int
    scheme: str
    space: int
    legal: int
    allocated: int = 0
    allocated_of: int = 0
    allocate_failed: int = 0
    wrong_verdicts: int = 0
    surveyed: int = 0
    whole: bool = False
    compiled: int = 0
    failed: int = 0
    deadline: int = 0
    local_memory: int = 0
    compile_s: float = 0.0
    messages: dict[str, int] = field(default_factory=dict)
    tensor_cores: dict[str, int] = field(default_factory=dict)
    source: str | None = None


def legal_configs(kernel: MoEKernel, shape: MoEShape, gpu: GpuSpec) -> list[LaunchConfig]:
    """Configs of the grid that both projections can run."""
    return [
        config
        for config in SearchSpace.grid(shape).configs()
        if all(kernel.illegal_reason(config, shape, role, gpu) is None for role in ROLES)
    ]


def count(kernel: MoEKernel, scheme: str, gpu: GpuSpec, options: argparse.Namespace) -> Counts:
    """All of one row; compiles what is missing."""
    shape = LAYERS[scheme]
    try:
        kernel.check(shape, gpu)
    except UnsupportedShapeError as error:
        refused = Counts(gpu.name, gpu.sm, scheme, len(SearchSpace.grid(shape)), 0)
        refused.messages = {str(error): 0}
        return refused
    legal = legal_configs(kernel, shape, gpu)
    counts = Counts(gpu.name, gpu.sm, scheme, len(SearchSpace.grid(shape)), len(legal))
    _count_allocated(counts, SHAPES[scheme], gpu)
    path = options.surveys / f"sm{gpu.sm}-{scheme}.jsonl.gz"
    if options.sample:
        _survey(kernel, shape, gpu, legal, path, options)
    if path.exists():
        _count_survey(counts, path)
    elif recording := _recording(shape, gpu):
        _count_survey(counts, recording)
        counts.source = recording.name
    return counts


def _recording(shape: MoEShape, gpu: GpuSpec) -> Path | None:
    """A recording of moeopt's kernel on this GPU in the scheme of the shape."""
    for path in sorted(RECORDINGS.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            header = json.loads(next(lines))
        there = MoEShape.from_dict(header["shape"])
        same = all(getattr(there, name) == getattr(shape, name) for name in SCHEME)
        if same and header["complete"] and header["gpu"]["name"] == gpu.name and header["kernel"].startswith("builtin"):
            return path
    return None


def _count_allocated(counts: Counts, shape: MoEShape, gpu: GpuSpec) -> None:
    path = RESOURCES / f"builtin-triton{version('triton')}-sm{gpu.sm}-{counts.scheme}.json.gz"
    if not path.exists():
        return
    data = json.loads(gzip.decompress(path.read_bytes()))
    counts.allocated_of = data["of"]
    for name, value in data["shared"].items():
        if isinstance(value, str):
            counts.allocate_failed += 1
            continue
        *numbers, role = name.split()
        bm, bn, bk, warps, stages = map(int, numbers)
        by_rule = illegal_reason(LaunchConfig(bm, bn, bk, 1, warps, stages), shape, role, gpu) is None
        counts.allocated += 1
        counts.wrong_verdicts += by_rule != (value <= gpu.shared_memory_per_block_optin)


def _survey(
    kernel: MoEKernel, shape: MoEShape, gpu: GpuSpec, legal: list[LaunchConfig], path: Path, options: argparse.Namespace
) -> None:
    """Goes on with a survey: a sample, or what a deadline ended of a whole one."""
    sweep = CompileSweep(kernel, shape, gpu, SearchSpace.grid(shape), DEFAULT_BATCH_SIZES, path)
    whole = path.exists() and len(_rows(path)) > max(options.sample, len(legal) / 2)
    sweep.configs = tuple(legal if whole else sorted(legal, key=_hash)[: options.sample])
    with PatientPool(kernel, shape, gpu.compute_capability, options.workers, options.cache_dir, inspect=True) as pool:
        sweep.run(pool)


def _rows(path: Path) -> list[dict[str, Any]]:
    _, *rows = (json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines())
    return [row for row in rows if row["status"] != "out_of_resources"]


def _count_survey(counts: Counts, path: Path) -> None:
    rows = _rows(path)
    counts.surveyed = len(rows)
    counts.whole = len(rows) == counts.legal
    cores, messages = Counter[str](), Counter[str]()
    for row in rows:
        # A recording keeps no reason apart from the message.
        error = str(row.get("error") or "")
        if "in local memory" in error:
            counts.compiled += 1
            counts.local_memory += 1
            continue
        if row["status"] != "ok":
            if row.get("reason") == TIMEOUT or error.startswith("compiling took over"):
                counts.deadline += 1
            else:
                counts.failed += 1
                messages[error] += 1
            continue
        counts.compiled += 1
        counts.compile_s += row["compile_s"] or 0.0
        counts.local_memory += any("rejected" in row[role] for role in ROLES)
        for role in ROLES:
            core = row[role].get("tensor_core")
            if "tensor_core" in row[role]:
                cores[" ".join(filter(None, core.values())) if core else "none"] += 1
    counts.compile_s = round(counts.compile_s, 1)
    counts.messages, counts.tensor_cores = dict(messages), dict(cores.most_common())


def markdown(rows: list[Counts]) -> str:
    """The table."""
    lines = [
        "| GPU | scheme | grid | legal | shared memory: (tile, projection) | rule wrong | binaries: configs | compiled "
        "| of them local memory | refused by the compiler | ended by a deadline | tensor cores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c in rows:
        shared = "-" if not c.allocated_of else f"{c.allocated + c.allocate_failed} of {c.allocated_of}"
        shared += f", {c.allocate_failed} failed" if c.allocate_failed else ""
        wrong = str(c.wrong_verdicts) if c.allocated_of else "-"
        extent = "-" if not c.surveyed else "all" if c.whole else f"{c.surveyed} of {c.legal}"
        numbers = [str(n) if c.surveyed else "-" for n in (c.compiled, c.local_memory, c.failed, c.deadline)]
        cores = ", ".join(c.tensor_cores)
        lines.append(
            f"| {c.gpu} (sm_{c.sm}) | {c.scheme} | {c.space} | {c.legal} | {shared} | {wrong} | {extent} | "
            + " | ".join(numbers)
            + f" | {cores} |"
        )
    failures = [
        f"- sm_{c.sm} {c.scheme}: {text}" + (f": {n}" if n else "") for c in rows for text, n in c.messages.items()
    ]
    return "\n".join([*lines, "", "Failures:" if failures else "No compile failed.", *failures])


def _hash(config: LaunchConfig) -> str:
    return hashlib.sha256(str(config).encode()).hexdigest()


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.json and OUT.md")
    parser.add_argument("--sample", type=int, default=0, help="compile so many of each; 0: only count")
    parser.add_argument("--surveys", type=Path, default=ROOT / ".cache" / "grid-counts")
    parser.add_argument("--gpu", action="append", choices=GPU_NAMES, help="only of this GPU; may be given again")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cache-dir", type=Path, default=ROOT / ".cache" / "grid-counts" / "triton")
    options = parser.parse_args()
    options.surveys.mkdir(parents=True, exist_ok=True)
    kernel, rows = get_kernel("builtin"), []
    for name in options.gpu or GPU_NAMES:
        gpu = GpuSpec.by_name(name)
        for scheme in LAYERS:
            rows.append(count(kernel, scheme, gpu, options))
            c = rows[-1]
            print(
                f"sm_{c.sm} {scheme}: {c.legal} of {c.space} legal, {c.compiled} compiled, "
                f"{c.failed} refused by the compiler, {c.deadline} ended by a deadline",
                flush=True,
            )
    text = (
        "# The published grid on six architectures\n\n`python -m benchmarks.grid_counts --sample 24 --out "
        f"benchmarks/results/grid-counts` (sm_120 with `--sample 2000`), Triton {version('triton')}, "
        f"moeopt's kernel {kernel.key.source_hash}. What the columns are stands at the top of the script.\n\n"
    )
    options.out.with_suffix(".md").write_text(text + markdown(rows) + "\n")
    content = {"triton": version("triton"), "kernel_hash": kernel.key.source_hash, "rows": [asdict(c) for c in rows]}
    options.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    from benchmarks import grid_counts

    grid_counts.main()
