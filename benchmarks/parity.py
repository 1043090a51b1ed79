"""Our kernel against SGLang's on one GPU: same configs, same operands, interleaved.

    MOEOPT_SGLANG_KERNEL=fused_moe_triton_kernels.py python -m benchmarks.parity
    python -m benchmarks.parity --dtypes bf16 --batch-sizes 1 64 --rounds 20

The variable names SGLang's kernel file where SGLang is not installed. Both kernels are launched as they
are served (dependent launches on compute capability 9 and more). Each time is of one CUDA graph of several
launches, each with a routing of its own; ours and theirs take turns. The bar: geometric mean of the time
ratios (ours / theirs) at most 1.02, none over 1.10.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_run import RESULTS, Binary, compile_ahead, machine_facts, table, write_json
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.errors import MoeoptError
from moeopt.kernels.base import MoEKernel

GEOMEAN_BAR, WORST_BAR = 1.02, 1.10
SHAPES = {
    "bf16": MoEShape(256, 8, 3072, 256),
    "fp8": MoEShape(256, 8, 6144, 256, dtype="fp8_w8a8", block_shape=(128, 128)),
}
# Beside the default: configs that won or nearly won on an H200, for few tokens and for many.
CONFIGS = {
    "bf16": (
        (16, (LaunchConfig(16, 32, 128, 16, 4, 5), LaunchConfig(16, 128, 64, 16, 4, 3))),
        (64, (LaunchConfig(16, 64, 128, 1, 4, 3), LaunchConfig(16, 128, 128, 64, 4, 2))),
        (1 << 20, (LaunchConfig(64, 128, 64, 16, 4, 3), LaunchConfig(128, 256, 64, 32, 8, 4))),
    ),
    "fp8": (
        (16, (LaunchConfig(16, 64, 128, 16, 4, 5), LaunchConfig(16, 256, 64, 32, 4, 2))),
        (64, (LaunchConfig(16, 64, 128, 1, 4, 3), LaunchConfig(16, 128, 128, 16, 4, 2))),
        (1 << 20, (LaunchConfig(64, 128, 128, 16, 4, 4), LaunchConfig(64, 128, 64, 16, 4, 3))),
    ),
}


@dataclass(frozen=True)
class Row:
    """One (dtype, role, M, config): median µs per launch and relative error of both kernels."""

    dtype: str
    role: Role
    batch_size: int
    config: LaunchConfig
    ours_us: float
    theirs_us: float
    ours_error: float
    theirs_error: float

    @property
    def ratio(self) -> float:
        """Time of ours over time of theirs."""
        return self.ours_us / self.theirs_us

    def cells(self) -> list[str]:
        """The row of the table."""
        return [
            f"{self.dtype} {self.role} M={self.batch_size}",
            str(self.config),
            f"{self.ours_us:.2f}",
            f"{self.theirs_us:.2f}",
            f"{self.ratio:.3f}",
            f"{max(self.ours_error, self.theirs_error):.4f}",
        ]


def configs_for(dtype: str, batch_size: int, kernel: MoEKernel, gpu: GpuSpec) -> list[LaunchConfig]:
    """The default and the listed ones that both roles can run on this GPU."""
    shape = SHAPES[dtype]
    listed = next(configs for limit, configs in CONFIGS[dtype] if batch_size <= limit)
    configs = dict.fromkeys((kernel.default_config(shape, "up", batch_size, gpu), *listed))
    return [c for c in configs if not any(kernel.illegal_reason(c, shape, role, gpu) for role in ROLES)]


def summary(rows: Sequence[Row]) -> tuple[float, Row]:
    """Geometric mean of the ratios, and the worst row."""
    return math.exp(statistics.fmean(math.log(row.ratio) for row in rows)), max(rows, key=lambda row: row.ratio)


def report(rows: Sequence[Row]) -> str:
    """Table, means by dtype, and how it stands with the bar."""
    lines = [table(["", "config", "ours µs", "theirs µs", "ratio", "error"], [row.cells() for row in rows])]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        mean, _ = summary([row for row in rows if row.dtype == dtype])
        lines.append(f"{dtype}: geometric mean {mean:.4f}")
    mean, worst = summary(rows)
    lines.append(f"all {len(rows)}: geometric mean {mean:.4f} (bar {GEOMEAN_BAR}), worst {worst.ratio:.3f} "
                 f"({worst.dtype} {worst.role} M={worst.batch_size} {worst.config}; bar {WORST_BAR})")  # fmt: skip
    return "\n".join(lines)


def measure(
    dtype: str, kernels: tuple[MoEKernel, MoEKernel], gpu: GpuSpec, batch_sizes: Sequence[int], rounds: int
) -> list[Row]:
    """All rows of one dtype, on the current CUDA device and stream."""
    import torch

    from moeopt.kernels.layer import make_batch, make_layer
    from moeopt.kernels.quant import compute_dtype
    from moeopt.kernels.reference import reference, relative_error
    from moeopt.kernels.routing import Routing
    from moeopt.measure.timer import GraphTimer

    shape, rows = SHAPES[dtype], []
    layer = make_layer(shape, device="cuda", seed=0)
    timers = (GraphTimer(), GraphTimer())
    for batch_size in batch_sizes:
        count = 12 if batch_size < 16 else 6
        routings = Routing.parse("uniform").draw(shape, batch_size, count, 0)
        for role in ROLES:
            batches = [make_batch(layer, role, torch.from_numpy(ids), seed=i) for i, ids in enumerate(routings)]
            expected = reference(layer, role, batches[0])
            out = torch.empty(expected.shape, dtype=compute_dtype(shape), device=layer.device)
            for config in configs_for(dtype, batch_size, kernels[1], gpu):
                errors = []
                for kernel, timer in zip(kernels, timers, strict=True):
                    launches = [kernel.bind(layer, role, batch, config, out) for batch in batches]
                    out.fill_(math.nan)
                    launches[0]()
                    errors.append(relative_error(out, expected))
                    timer.capture(launches)
                    timer.time()
                times: tuple[list[float], list[float]] = ([], [])
                for number in range(rounds):
                    for which in (0, 1) if number % 2 else (1, 0):
                        times[which].append(timers[which].time())
                ours, theirs = (statistics.median(t) for t in times)
                rows.append(Row(dtype, role, batch_size, config, ours, theirs, errors[0], errors[1]))
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 16, 64, 512, 4096], metavar="M")
    parser.add_argument("--rounds", type=int, default=15, help="timed replays of each kernel per row")
    parser.add_argument("--json", type=Path, help="where to write; default benchmarks/results/parity-<GPU>.json")
    args = parser.parse_args(argv)
    if min(args.batch_sizes) < 1 or args.rounds < 1:
        parser.error("batch sizes and rounds are at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 if the bar is missed, 2 if it cannot run."""
    args = parse(argv)
    from moeopt.kernels import get_kernel

    started = time.monotonic()
    try:
        gpu = GpuSpec.detect()
        kernels = (get_kernel("builtin"), get_kernel("sglang"))
    except MoeoptError as error:
        print(error, file=sys.stderr)
        return 2
    binaries = [
        Binary(kernel, SHAPES[dtype], role, m, config)
        for dtype in args.dtypes
        for m in args.batch_sizes
        for config in configs_for(dtype, m, kernels[1], gpu)
        for role in ROLES
        for kernel in kernels
    ]
    failed = compile_ahead(binaries, gpu.compute_capability)
    if failed:
        print("\n".join(failed), file=sys.stderr)
        return 2
    compiled_s = time.monotonic() - started

    import torch

    rows: list[Row] = []
    stream: Any = torch.cuda.Stream  # torch leaves it untyped
    with torch.cuda.stream(stream()):
        for dtype in args.dtypes:
            rows += measure(dtype, kernels, gpu, args.batch_sizes, args.rounds)
            torch.cuda.empty_cache()
    print(report(rows))
    mean, worst = summary(rows)
    wall_s = time.monotonic() - started
    print(f"{gpu.name}; {wall_s:.0f} s, of which {compiled_s:.0f} s compiling")
    content: dict[str, Any] = {
        "benchmark": "parity",
        "machine": machine_facts(gpu),
        "kernels": [asdict(kernel.key) for kernel in kernels],
        "rounds": args.rounds,
        "wall_s": round(wall_s, 1),
        "geometric_mean": mean,
        "worst": worst.ratio,
        "rows": [{**asdict(row), "config": row.config.to_dict(), "ratio": row.ratio} for row in rows],
    }
    path = args.json or RESULTS / f"parity-{gpu.name.replace(' ', '_')}.json"
    write_json(path, content)
    print(f"written to {path}")
    wrong = [row for row in rows if not max(row.ours_error, row.theirs_error) < 1e-2]
    return int(mean > GEOMEAN_BAR or worst.ratio > WORST_BAR or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
