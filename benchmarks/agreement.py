"""The worker's times beside those of ``triton.testing``, on the same launches: what differs, and by how much.

    python -m benchmarks.agreement

The worker times a graph of several launches in a row, each over another routing, with events before the
first and after the last. ``do_bench`` times one launch at a time and writes 256 MB before each. So that the
reasons for a difference can be told apart, every case is timed in several ways, in turn, three times over:

- ``worker``: the bench that runs in the GPU worker;
- ``no pdl``: the same with ordinary instead of programmatic dependent launches;
- ``alone``: the same, one launch a graph;
- ``x4``: the row four times over in one graph: what is paid once per graph is paid a quarter as often;
- ``do_bench``: each launch alone, mean of the medians over the routings;
- ``clean``: ``do_bench`` whose flush reads 256 MB where the original writes them, so that L2 holds no line
  that has to be written back while the kernel runs;
- ``no flush``: ``do_bench`` without a flush, on cases whose weights exceed L2 by far;
- ``row``, ``row x4``: ``do_bench`` of the worker's launches, and of four times those, per launch;
- ``clean row``: ``do_bench`` of the worker's launches behind a flush that reads;
- ``cudagraph``: ``do_bench_cudagraph`` of the row, per launch.

Last come an empty kernel's times under ``do_bench``, with either flush: what a launch costs that does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench, do_bench_cudagraph

from benchmarks.gpu_run import RESULTS, Binary, compile_ahead, machine_facts, table, write_json
from moeopt.gpu import GpuSpec
from moeopt.kernels import builtin
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.kernels.layer import Layer, RoutedBatch
from moeopt.measure.base import Cell, Job
from moeopt.measure.bench import CudaBench
from moeopt.measure.timer import GraphTimer
from moeopt.shape import MoEShape, Role
from moeopt.space import LaunchConfig

BAR, LONG_US = 0.02, 50.0
SHAPES = {
    "bf16": MoEShape(256, 8, 3072, 256),
    "fp8": MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128)),
}
CASES: tuple[tuple[str, Role, int, LaunchConfig], ...] = (
    ("bf16", "up", 16, LaunchConfig(16, 128, 64, 16, 4, 3)),
    ("bf16", "down", 64, LaunchConfig(16, 128, 64, 16, 4, 3)),
    ("bf16", "up", 256, LaunchConfig(16, 128, 128, 16, 4, 2)),
    ("bf16", "down", 1024, LaunchConfig(64, 128, 64, 16, 4, 3)),
    ("bf16", "up", 4096, LaunchConfig(64, 128, 64, 16, 4, 3)),
    ("bf16", "down", 4096, LaunchConfig(64, 128, 64, 16, 4, 3)),
    ("fp8", "up", 64, LaunchConfig(16, 128, 128, 16, 4, 3)),
    ("fp8", "down", 1024, LaunchConfig(64, 128, 128, 16, 4, 3)),
)
REPEATS, ROUNDS, REP_MS = 3, 7, 20


class OrdinaryLaunch(BuiltinKernel):
    """The builtin kernel without programmatic dependent launch."""

    def bind(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: torch.Tensor
    ) -> Callable[[], None]:
        options = builtin._options(layer.shape, role, config, torch.cuda.get_device_capability(layer.device))
        options.pop("launch_pdl", None)
        return builtin.launch(layer, role, batch, config, out, options | {"DEPENDENT_LAUNCH": False})


@triton.jit
def nothing(pointer):  # type: ignore[no-untyped-def]
    """Does nothing."""


@contextlib.contextmanager
def flush(clear: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Has ``do_bench`` empty L2 in another way."""
    active = triton.runtime.driver.active
    active.clear_cache = clear
    try:
        yield
    finally:
        del active.clear_cache


def median_us(function: Callable[[], None]) -> float:
    """``do_bench``'s median in microseconds."""
    return 1000 * float(do_bench(function, warmup=5, rep=REP_MS, return_mode="median"))


def each_us(launches: Sequence[Callable[[], None]]) -> float:
    """Mean over the launches of ``do_bench``'s medians."""
    return statistics.fmean(median_us(launch) for launch in launches)


def in_row(launches: Sequence[Callable[[], None]], times: int) -> Callable[[], None]:
    """A function that makes the launches one after the other."""

    def row() -> None:
        for _ in range(times):
            for launch in launches:
                launch()

    return row


def rounds_us(timer: GraphTimer) -> float:
    """Median of a captured graph's rounds, per launch."""
    timer.replay()
    return statistics.median(timer.time() for _ in range(ROUNDS))


def measure(bench: CudaBench, ordinary: BuiltinKernel, role: Role, m: int, config: LaunchConfig) -> dict[str, float]:
    """All ways of timing one config: microseconds per launch, medians of the repeats."""
    bench.prepare(Cell(role, m))
    bench.check(Job(Cell(role, m), config))
    launches = bench._sides[0].launches
    workload = bench._workload(role, m)
    out = bench._output(0, workload)
    plain = [
        ordinary.bind(bench._layers[i % workload.workset.copies], role, batch, config, out)
        for i, batch in enumerate(workload.batches)
    ]
    for launch in plain:
        launch()
    count = len(launches)
    graphs = {"no pdl": plain, "x4": [*launches] * 4}
    timers = {name: GraphTimer() for name in graphs}
    for name, row in graphs.items():
        timers[name].capture(row)
    single = [GraphTimer() for _ in launches]
    for timer, launch in zip(single, launches, strict=True):
        timer.capture([launch])
    bench.round()
    ways: dict[str, Callable[[], float]] = {
        "worker": lambda: statistics.median(bench.round() for _ in range(ROUNDS)),
        "no pdl": lambda: rounds_us(timers["no pdl"]),
        "alone": lambda: alone_us(single),
        "x4": lambda: rounds_us(timers["x4"]),
        "do_bench": lambda: each_us(launches),
        "clean": lambda: with_flush(torch.sum, lambda: each_us(launches)),
        "no flush": lambda: with_flush(lambda _: None, lambda: each_us(launches)),
        "row": lambda: median_us(in_row(launches, 1)) / count,
        "row x4": lambda: median_us(in_row(launches, 4)) / count / 4,
        "clean row": lambda: with_flush(torch.sum, lambda: median_us(in_row(launches, 1)) / count),
        "cudagraph": lambda: (
            1000 * float(do_bench_cudagraph(in_row(launches, 1), rep=REP_MS, return_mode="median")) / count
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            found[name].append(way())
    bench.finish()
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def alone_us(timers: Sequence[GraphTimer]) -> float:
    """Each launch in a graph of its own, in turn: median over the rounds of the mean over the launches."""
    return statistics.median(statistics.fmean(timer.time() for timer in timers) for _ in range(ROUNDS))


def with_flush(clear: Callable[[torch.Tensor], object], way: Callable[[], float]) -> float:
    """A way of timing under another flush."""
    with flush(clear):
        return way()


def main(argv: Sequence[str] | None = None) -> int:
    """Times all cases, prints and writes them; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--json", type=Path, help="where to write; default benchmarks/results/agreement-<GPU>.json")
    args = parser.parse_args(argv)
    started = time.monotonic()
    gpu = GpuSpec.detect(0)
    chosen = [case for case in CASES if case[0] in args.dtypes]
    failed = compile_ahead(
        (Binary(BuiltinKernel(), SHAPES[dtype], role, m, config) for dtype, role, m, config in chosen),
        gpu.compute_capability,
    )
    if failed:
        print("\n".join(failed), file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    timing = ""
    for dtype in dict.fromkeys(case[0] for case in chosen):
        sizes = tuple(m for name, _, m, _ in chosen if name == dtype)
        bench = CudaBench(BuiltinKernel, SHAPES[dtype], 0, "uniform", sizes)
        timing = bench.open()["timing"]
        for name, role, m, config in chosen:
            if name == dtype:
                us = measure(bench, OrdinaryLaunch(), role, m, config)
                rows.append({"dtype": name, "role": role, "batch_size": m, "config": config.to_dict(), "us": us})
        del bench
        torch.cuda.empty_cache()
    pointer = torch.zeros(1, device="cuda")
    floor = {"do_bench": median_us(lambda: nothing[(1,)](pointer))}
    floor["clean"] = with_flush(torch.sum, lambda: median_us(lambda: nothing[(1,)](pointer)))
    names = list(rows[0]["us"])
    print(f"{gpu.name}, {timing}; µs per launch, and the difference to the worker's")
    for shown in (lambda r, n: f"{r['us'][n]:.1f}", lambda r, n: f"{100 * (r['us'][n] / r['us']['worker'] - 1):+.1f}%"):
        body = [[f"{r['dtype']} {r['role']} {r['batch_size']}", *(shown(r, n) for n in names)] for r in rows]
        print(table(["", *names], body))
    long = [r["us"] for r in rows if r["us"]["do_bench"] > LONG_US]
    worst = {n: max(abs(us["worker"] / us[n] - 1) for us in long) for n in names if n != "worker"}
    print("worst difference over 50 µs: " + ", ".join(f"{n} {100 * value:.1f} %" for n, value in worst.items()))
    print("an empty kernel: " + ", ".join(f"{n} {us:.1f} µs" for n, us in floor.items()))
    wall = time.monotonic() - started
    path = args.json or RESULTS / f"agreement-{gpu.name.replace(' ', '_')}.json"
    write_json(
        path,
        {
            "benchmark": "agreement", "machine": machine_facts(gpu), "timing": timing, "wall_s": round(wall, 1),
            "rows": rows, "empty_us": floor, "worst": worst,
        },
    )  # fmt: skip
    print(f"{wall:.0f} s; written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
