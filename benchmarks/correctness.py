"""Our kernel against the reference on one GPU, at real sizes: every dtype and scheme, both roles.

    python -m benchmarks.correctness                      # about a minute
    python -m benchmarks.correctness --cases fp8 int4     # cases whose name holds one of the words
    python -m benchmarks.correctness --kernel sglang      # the same for an engine's kernel

Each row is the worst of its configs: relative Frobenius error (or a tenth of the worst row's, if that is
more) of an output that was poisoned with NaN before the launch.
"""

from __future__ import annotations

import argparse
import math
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
from moeopt.errors import DeviceError, MoeoptError, UnsupportedShapeError
from moeopt.kernels.base import MoEKernel

CONFIGS = (LaunchConfig(16, 64, 64, 1, 4, 3), LaunchConfig(64, 128, 64, 16, 4, 3), LaunchConfig(32, 32, 128, 4, 4, 2))
_MIB = 1024**2


@dataclass(frozen=True)
class Case:
    """A layer and the token counts that are tried."""

    name: str
    shape: MoEShape
    batch_sizes: tuple[int, ...] = (1, 64, 1024)
    routing: str = "uniform"


def _cases() -> tuple[Case, ...]:
    real = MoEShape(128, 8, 2048, 768)
    uneven = MoEShape(32, 4, 2880, 360)  # neither size is a multiple of 64 in both roles
    schemes: dict[str, dict[str, Any]] = {
        "bf16": {},
        "fp16": {"dtype": "fp16"},
        "fp8 tensor": {"dtype": "fp8_w8a8"},
        "fp8 channel": {"dtype": "fp8_w8a8", "per_channel": True},
        "fp8 block": {"dtype": "fp8_w8a8", "block_shape": (128, 128)},
        "fp8 block 64": {"dtype": "fp8_w8a8", "block_shape": (64, 128)},
        "int8 channel": {"dtype": "int8_w8a8", "per_channel": True},
        "int8 block": {"dtype": "int8_w8a8", "block_shape": (128, 128)},
        "int8 weights": {"dtype": "int8_w8a16", "per_channel": True},
        "int8 weights group 128": {"dtype": "int8_w8a16", "group_size": 128},
        "int4 group 32": {"dtype": "int4_w4a16", "group_size": 32},
        "int4 group 64": {"dtype": "int4_w4a16", "group_size": 64},
        "int4 group 128": {"dtype": "int4_w4a16", "group_size": 128},
    }
    return (
        *(Case(name, real.replace(**changes)) for name, changes in schemes.items()),
        Case("bf16 uneven", uneven),
        Case("fp8 tensor uneven", uneven.replace(dtype="fp8_w8a8")),
        Case("fp8 block uneven", uneven.replace(dtype="fp8_w8a8", block_shape=(128, 128))),
        Case("bf16 top 1", real.replace(top_k=1)),
        Case("bf16 skewed", real, (1024,), "zipf:2"),
        Case("bf16 other ranks", real.replace(ep_size=8)),
        Case("bf16 shared expert", real.replace(num_experts=129, top_k=9, shared_experts=1)),
        Case("fp8 block many tokens", real.replace(dtype="fp8_w8a8", block_shape=(128, 128)), (16384,)),
        # Outputs and weights of more than 2^31 elements.
        Case("bf16 1024 experts top 22", MoEShape(1024, 22, 7168, 256), (1, 16384)),
    )


CASES = _cases()


@dataclass(frozen=True)
class Row:
    """The worst error over the configs of one (case, role, M)."""

    case: str
    role: Role
    batch_size: int
    error: float
    config: LaunchConfig
    configs: int

    def cells(self) -> list[str]:
        """The row of the table."""
        return [self.case, self.role, str(self.batch_size), f"{self.error:.5f}", str(self.config), str(self.configs)]


def legal_configs(kernel: MoEKernel, shape: MoEShape, role: Role, gpu: GpuSpec) -> list[LaunchConfig]:
    """The configs that the kernel and the GPU allow."""
    return [c for c in CONFIGS if not kernel.illegal_reason(c, shape, role, gpu)]


def bytes_needed(case: Case) -> int:
    """Rough device memory of a case: weights, the largest output, its float32 reference and their difference."""
    shape = case.shape
    rows = max(case.batch_sizes) * shape.top_k
    weights = sum(shape.num_experts * shape.output_rows(r) * shape.reduction(r) * 2 for r in ROLES)
    return weights + rows * max(shape.output_rows(r) for r in ROLES) * 7 + rows * 8 * shape.hidden_size + 512 * _MIB


def measure(case: Case, kernel: MoEKernel, gpu: GpuSpec, device: str = "cuda") -> list[Row]:
    """All rows of a case."""
    import torch

    from moeopt.kernels.layer import make_batch, make_layer
    from moeopt.kernels.quant import compute_dtype
    from moeopt.kernels.reference import poison, reference, relative_error
    from moeopt.kernels.routing import Routing

    rows, shape = [], case.shape
    layer = make_layer(shape, device=device, seed=0)
    for batch_size in case.batch_sizes:
        ids = torch.from_numpy(Routing.parse(case.routing).draw(shape, batch_size, 1, 0)[0])
        for role in ROLES:
            batch = make_batch(layer, role, ids, seed=1)
            expected = reference(layer, role, batch)
            out = torch.empty(expected.shape, dtype=compute_dtype(shape), device=device)
            errors = {}
            for config in legal_configs(kernel, shape, role, gpu):
                poison(out, batch, skips_remote_experts=kernel.skips_remote_experts(shape))
                kernel.bind(layer, role, batch, config, out)()
                errors[config] = relative_error(out, expected)
            if errors:
                worst = max(errors, key=lambda config: errors[config])
                rows.append(Row(case.name, role, batch_size, errors[worst], worst, len(errors)))
            del batch, expected, out
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.correctness", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD", help="only cases whose name holds a word")
    parser.add_argument("--kernel", choices=("builtin", "sglang", "vllm"), default="builtin")
    parser.add_argument("--json", type=Path, help="where to write; default benchmarks/results/correctness-...json")
    args = parser.parse_args(argv)
    args.chosen = [case for case in CASES if not args.cases or any(word in case.name for word in args.cases)]
    if not args.chosen:
        parser.error(f"no case holds {' or '.join(args.cases)}: the cases are {', '.join(c.name for c in CASES)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep; 1 if a result is wrong or a case could not run, 2 if nothing can run."""
    args = parse(argv)
    import torch

    from moeopt.core.trial import MAX_RELATIVE_ERROR
    from moeopt.kernels import get_kernel

    started = time.monotonic()
    try:
        gpu = GpuSpec.detect()
        kernel = get_kernel(args.kernel)
    except MoeoptError as error:
        print(error, file=sys.stderr)
        return 2
    skipped, cases = [], []
    for case in args.chosen:
        try:
            kernel.check(case.shape, gpu)
            free, _ = torch.cuda.mem_get_info()
            if bytes_needed(case) > free:
                raise DeviceError(f"needs {bytes_needed(case) // _MIB:,} MiB, {free // _MIB:,} MiB are free")
        except (UnsupportedShapeError, DeviceError) as error:
            skipped.append(f"{case.name}: {error}")
        else:
            cases.append(case)
    failures = compile_ahead(
        (
            Binary(kernel, case.shape, role, m, config)
            for case in cases
            for role in ROLES
            for config in legal_configs(kernel, case.shape, role, gpu)
            for m in case.batch_sizes
        ),
        gpu.compute_capability,
    )
    rows = []
    for case in cases if not failures else ():
        rows += measure(case, kernel, gpu)
        torch.cuda.empty_cache()
    print(table(["case", "role", "M", "error", "worst config", "configs"], [row.cells() for row in rows]))
    for line in (*(f"skipped: {s}" for s in skipped), *(f"failed: {f}" for f in failures)):
        print(line)
    wall_s = time.monotonic() - started
    wrong = [row for row in rows if not row.error < MAX_RELATIVE_ERROR]
    print(f"{gpu.name}, {kernel.key.name} kernel: {len(rows)} rows, {len(wrong)} wrong, {wall_s:.0f} s")
    path = args.json or RESULTS / f"correctness-{kernel.key.name}-{gpu.name.replace(' ', '_')}.json"
    write_json(
        path,
        {
            "benchmark": "correctness",
            "machine": machine_facts(gpu),
            "kernel": asdict(kernel.key),
            "tolerance": MAX_RELATIVE_ERROR,
            "wall_s": round(wall_s, 1),
            "skipped": skipped,
            "failed": failures,
            "rows": [
                {
                    **asdict(row),
                    "error": row.error if math.isfinite(row.error) else None,
                    "config": row.config.to_dict(),
                }
                for row in rows
            ],
        },
    )
    print(f"written to {path}")
    return int(bool(wrong or failures))


if __name__ == "__main__":
    sys.exit(main())
