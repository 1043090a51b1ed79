"""The worker's times beside those of ``triton.testing.do_bench``, on the same launches.

    python -m benchmarks.agreement

The worker times a CUDA graph that holds a row of launches, each over another routing, and gives
microseconds per launch. ``do_bench`` is given a graph of the same launches, the row so often that it takes
about two milliseconds. The two take turns about twenty times for every config, a few milliseconds each and
right after as much of their own work. Each pair of neighbouring results gives one ratio; the median of the
ratios is the answer. The bar is 2 % for kernels over 50 µs.

A graph, because the host needs tens of microseconds for a launch from Python (the column "host"). Two
milliseconds, because ``do_bench`` writes 256 MB before each call, which leaves L2 full of lines that must go
to memory while the first launch runs: 8 to 11 µs on an H200, 2 % of six launches of 80 µs. Between the rows
a tiny kernel, because the worker's rows, too, start on a GPU that has nothing else to do: the launches of a
row are dependent ones, whose programs take their places while the launch before drains, and of a kernel
that fills the GPU about once, launches in a long row are up to 7 % slower than in a row of six. Its time counts
as ``do_bench``'s.

Pairs are needed because large batches run into the GPU's power limit: its clock then depends on what ran
in the second before, and two times that are taken one after the other differ by up to 10 %, whatever
takes them. The clock is measured right after each result, and a pair whose clocks are more than 1 % apart
does not count; how many were left out is printed. Where fewer than five are left, all of them count, and
the row says so.

The last column is plain ``do_bench`` of one launch from Python. It is longer for two reasons that a server
does not have: those lines in L2, and a launch that starts on an idle GPU takes about 3 µs more than one in a
row.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_run import RESULTS, Binary, compile_ahead, machine_facts, table, write_json
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Cell, Job
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.measure.cuda_bench import CudaBench

BAR: Final = 0.02
LONG_US: Final = 50.0
SHAPES: Final = {
    "bf16": MoEShape(256, 8, 3072, 256),
    "fp8": MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128)),
}
CASES: Final[tuple[tuple[str, Role, int, LaunchConfig], ...]] = (
    ("bf16", "up", 16, LaunchConfig(16, 128, 64, 16, 4, 3)),
    ("bf16", "down", 64, LaunchConfig(16, 128, 64, 16, 4, 3)),
    ("bf16", "up", 256, LaunchConfig(16, 128, 128, 16, 4, 2)),
    ("bf16", "down", 1024, LaunchConfig(64, 128, 64, 16, 4, 3)),
    ("bf16", "up", 4096, LaunchConfig(64, 128, 64, 16, 4, 3)),
    ("bf16", "down", 4096, LaunchConfig(64, 128, 64, 16, 4, 3)),
    ("fp8", "up", 64, LaunchConfig(16, 128, 128, 16, 4, 3)),
    ("fp8", "down", 1024, LaunchConfig(64, 128, 128, 16, 4, 3)),
)
PAIRS: Final = 20
FEWEST_PAIRS: Final = 5
SAME_CLOCK: Final = 0.01
# A case goes on to more pairs than asked for while too many are left out, for so many seconds.
CASE_S: Final = 3.0
REP_MS: Final = 8
# Work right before each result, so that the clock has settled.
HEAT_US: Final = 20_000.0
# How long what do_bench is given takes at least: the row is repeated until it does.
CALL_US: Final = 2000.0
ROUNDS: Final = 3
CLOCK_CYCLES: Final = 400_000


@dataclass(frozen=True, slots=True)
class Pair:
    """Two neighbouring results on one config.

    Attributes:
        worker_us: Microseconds per launch, as the worker times.
        do_bench_us: Microseconds per launch, ``do_bench``'s median of the row.
        worker_ghz: The GPU's clock right after the worker's.
        do_bench_ghz: The GPU's clock right after ``do_bench``'s.
    """

    worker_us: float
    do_bench_us: float
    worker_ghz: float
    do_bench_ghz: float

    @property
    def same_clock(self) -> bool:
        """Whether both were timed at one clock."""
        return abs(self.worker_ghz / self.do_bench_ghz - 1) <= SAME_CLOCK

    @property
    def ratio(self) -> float:
        """The worker's time over ``do_bench``'s."""
        return self.worker_us / self.do_bench_us


@dataclass(frozen=True)
class Row:
    """What was found for one config.

    Attributes:
        dtype: Name of the shape.
        role: Which projection.
        batch_size: Tokens.
        config: What was launched.
        launches: Launches of a row.
        rows: Rows in what ``do_bench`` is given.
        pairs: All pairs, in the order in which they were timed.
        host_us: How long the host takes to issue one launch from Python.
        single_us: Plain ``do_bench`` of one launch: median over the launches of the row.
    """

    dtype: str
    role: Role
    batch_size: int
    config: LaunchConfig
    launches: int
    rows: int
    pairs: tuple[Pair, ...]
    host_us: float
    single_us: float

    @property
    def counted(self) -> tuple[Pair, ...]:
        """The pairs at one clock, or all where these are too few."""
        same = tuple(pair for pair in self.pairs if pair.same_clock)
        return same if len(same) >= FEWEST_PAIRS else self.pairs

    @property
    def apart(self) -> float:
        """Median of the ratios, less one."""
        return statistics.median(pair.ratio for pair in self.counted) - 1

    @property
    def us(self) -> tuple[float, float]:
        """Medians of the worker's and of ``do_bench``'s microseconds."""
        counted = self.counted
        return statistics.median(p.worker_us for p in counted), statistics.median(p.do_bench_us for p in counted)

    def to_dict(self) -> dict[str, Any]:
        """For the result file."""
        worker, bench = self.us
        return {
            "dtype": self.dtype, "role": self.role, "batch_size": self.batch_size, "config": self.config.to_dict(),
            "launches": self.launches, "rows": self.rows, "worker_us": round(worker, 3), "do_bench_us": round(bench, 3),
            "apart": round(self.apart, 5), "pairs": len(self.pairs), "counted": len(self.counted),
            "one_clock": all(pair.same_clock for pair in self.counted),
            "host_us": round(self.host_us, 3), "single_us": round(self.single_us, 3),
            "every_pair": [[round(value, 4) for value in asdict(pair).values()] for pair in self.pairs],
        }  # fmt: skip


def worst(rows: Sequence[Row]) -> float | None:
    """The largest difference of a kernel over 50 µs, as a share; None where there is none so long."""
    return max((abs(row.apart) for row in rows if row.us[1] > LONG_US), default=None)


def compare(bench: CudaBench, dtype: str, role: Role, m: int, config: LaunchConfig, pairs: int = PAIRS) -> Row:
    """Times one config in pairs, on the current GPU.

    Args:
        bench: The worker's bench, open.
        dtype: Name of the bench's shape.
        role: Which projection.
        m: Tokens.
        config: What to launch.
        pairs: How many to time; more, if so many are not at one clock.
    """
    job = Job(Cell(role, m), config)
    bench.prepare(job.cell)
    bench.check(job)
    launches = bench._sides[0].launches
    bench.round()  # captures the graph
    row_us = bench.round() * len(launches)
    rows = math.ceil(CALL_US / row_us)
    call, host_us = one_graph(launches, rows)

    def worker() -> float:
        for _ in range(math.ceil(HEAT_US / row_us)):
            bench.round()
        return statistics.median(bench.round() for _ in range(ROUNDS))

    def plain() -> float:
        for _ in range(math.ceil(HEAT_US / row_us / rows)):
            call()
        return median_us(call, REP_MS) / (rows * len(launches))

    found: list[Pair] = []
    singles: list[float] = []
    started = time.monotonic()
    while len(found) < pairs or (
        sum(pair.same_clock for pair in found) < pairs and time.monotonic() - started < CASE_S
    ):
        number = len(found)
        # Each goes first every other time, so that neither always has the warmer GPU.
        sides: dict[str, tuple[float, float]] = {}
        for name in ("worker", "plain") if number % 2 == 0 else ("plain", "worker"):
            sides[name] = ((worker if name == "worker" else plain)(), clock_ghz())
        (ours, our_clock), (theirs, their_clock) = sides["worker"], sides["plain"]
        found.append(Pair(ours, theirs, our_clock, their_clock))
        if number < pairs:
            singles.append(median_us(launches[number % len(launches)], REP_MS / 2))
    bench.finish()
    return Row(dtype, role, m, config, len(launches), rows, tuple(found), host_us, statistics.median(singles))


def one_graph(launches: Sequence[Callable[[], None]], rows: int) -> tuple[Callable[[], None], float]:
    """Replays so many rows of the launches as one graph; and the host's microseconds for a launch from Python."""
    import torch

    torch.cuda.current_stream().synchronize()
    started = time.perf_counter()
    for launch in launches:
        launch()
    host_us = (time.perf_counter() - started) * 1e6 / len(launches)
    torch.cuda.current_stream().synchronize()
    between = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rows):
            between.add_(1.0)
            for launch in launches:
                launch()
    return graph.replay, host_us


def median_us(function: Callable[[], None], rep_ms: float) -> float:
    """``do_bench``'s median in microseconds."""
    from triton.testing import do_bench

    return 1000 * float(do_bench(function, warmup=1, rep=rep_ms, return_mode="median"))


def clock_ghz() -> float:
    """The multiprocessors' clock: how long so many cycles take."""
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    torch.cuda._sleep(CLOCK_CYCLES)
    last.record()
    torch.cuda.current_stream().synchronize()
    return CLOCK_CYCLES / (1e6 * first.elapsed_time(last))


def report(rows: Sequence[Row]) -> str:
    """The table, and the worst difference."""
    head = ("", "config", "worker", "do_bench", "apart", "pairs", "GHz", "host", "one launch", "apart")
    body = []
    for row in rows:
        ours, theirs = row.us
        clock = statistics.median(pair.worker_ghz for pair in row.counted)
        note = "" if all(pair.same_clock for pair in row.counted) else "*"
        body.append(
            (
                f"{row.dtype} {row.role} M={row.batch_size}", str(row.config), f"{ours:.1f}", f"{theirs:.1f}",
                f"{100 * row.apart:+.1f} %", f"{len(row.counted)}/{len(row.pairs)}{note}", f"{clock:.2f}",
                f"{row.host_us:.1f}", f"{row.single_us:.1f}", f"{100 * (ours / row.single_us - 1):+.1f} %",
            )
        )  # fmt: skip
    lines = [table(head, body)]
    if any(cells[5].endswith("*") for cells in body):
        lines.append("* the clock did not hold still: pairs at two clocks count, too")
    found = worst(rows)
    if found is not None:
        verdict = "holds" if found <= BAR else "MISSED"
        lines.append(f"worst difference over {LONG_US:g} µs: {100 * found:.2f} % (bar {100 * BAR:g} %: {verdict})")
    return "\n".join(lines)


def run(dtypes: Sequence[str], pairs: int = PAIRS) -> tuple[list[Row], dict[str, Any]]:
    """Times all cases of these shapes on the first GPU.

    Returns:
        The rows, and the result as it is written.

    Raises:
        RuntimeError: A config cannot be compiled.
    """
    import torch

    started = time.monotonic()
    gpu = GpuSpec.detect(0)
    chosen = [case for case in CASES if case[0] in dtypes]
    failed = compile_ahead(
        (Binary(BuiltinKernel(), SHAPES[dtype], role, m, config) for dtype, role, m, config in chosen),
        gpu.compute_capability,
    )
    if failed:
        raise RuntimeError("; ".join(failed))
    rows: list[Row] = []
    timing = ""
    for dtype in dict.fromkeys(case[0] for case in chosen):
        own = [case for case in chosen if case[0] == dtype]
        bench = CudaBench(BuiltinKernel, SHAPES[dtype], 0, "uniform", tuple(dict.fromkeys(case[2] for case in own)))
        timing = bench.open().timing
        rows += [compare(bench, *case, pairs=pairs) for case in own]
        del bench
        torch.cuda.empty_cache()
    found = worst(rows)
    return rows, {
        "benchmark": "agreement", "machine": machine_facts(gpu), "timing": timing,
        "wall_s": round(time.monotonic() - started, 1), "worst_over_50_us": found, "bar": BAR,
        "columns_of_every_pair": [*Pair.__slots__], "rows": [row.to_dict() for row in rows],
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Times all cases, prints and writes them; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--pairs", type=int, default=PAIRS, help="how often the two take turns on a config")
    parser.add_argument("--json", type=Path, help="where to write; default benchmarks/results/agreement-<GPU>.json")
    args = parser.parse_args(argv)
    rows, result = run(args.dtypes, args.pairs)
    name = result["machine"]["gpu"]
    print(f"{name}, {result['timing']}; µs per launch\n{report(rows)}")
    path = args.json or RESULTS / f"agreement-{name.replace(' ', '_')}.json"
    write_json(path, result)
    print(f"{result['wall_s']:.0f} s; written to {path}")
    return int((result["worst_over_50_us"] or 0.0) > BAR)


if __name__ == "__main__":
    sys.exit(main())
