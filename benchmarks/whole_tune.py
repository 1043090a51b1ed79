"""A whole tune on a GPU, from import to exported files, beside the published procedure on the same GPU.

    python -m benchmarks.whole_tune --shape qwen3.5 --kernel builtin
    python -m benchmarks.whole_tune --shape glm5 --skip-published
    python -m benchmarks.agreement

Every part runs in a process of its own:

- ``cold``: the tune with an empty Triton cache and an empty study database;
- ``warm``: another shape of the same dtype, with the Triton cache that the cold run left;
- ``published``: the procedure of the engines' own scripts (one process, serial just-in-time compiling,
  160 launches of both projections per config and batch size) on a random sample of the space's legal
  configs, scaled to all of them;
- ``agreement``: the worker's times beside ``triton.testing.do_bench``'s of the same launches, in turn
  (:mod:`benchmarks.agreement`, in a file of its own).

Bars (H200, 16 cores): cold 60 s for bf16 and 90 s for block fp8, warm 25 s, search and storage together
under 10 % of the cold run, 60 times as fast as the published procedure, 2 % agreement over 50 µs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_run import RESULTS, machine_facts, table, write_json
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import DEFAULT_BATCH_SIZES, ROLES, MoEShape
from moeopt.core.space import SearchSpace

# The shape that is tuned cold, the one that is tuned with its cache, and the bar of the cold run in seconds.
SHAPES: dict[str, tuple[MoEShape, MoEShape, float]] = {
    "qwen3.5": (MoEShape(256, 8, 3072, 256), MoEShape(128, 8, 4096, 384), 60.0),
    "glm5": (
        MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128)),
        MoEShape(256, 8, 7168, 256, "fp8_w8a8", (128, 128)),
        90.0,
    ),
}
WARM_BAR_S, OVERHEAD_BAR, SPEEDUP_BAR, AGREEMENT_BAR = 25.0, 0.10, 60.0, 0.02
# What the published scripts launch for one config and batch size: 10 while preparing, then a graph of
# 10 launches replayed 5 times to warm up and 10 times to be timed.
PREPARE, PER_GRAPH, WARM_UPS, REPLAYS = 10, 10, 5, 10


def main() -> None:
    """Parses the command line, runs the parts, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5")
    parser.add_argument("--kernel", default="builtin")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(DEFAULT_BATCH_SIZES))
    parser.add_argument("--sample", type=int, default=12, help="Configs that the published procedure is timed on.")
    parser.add_argument("--skip-published", action="store_true")
    parser.add_argument("--skip-warm", action="store_true")
    parser.add_argument("--skip-agreement", action="store_true")
    parser.add_argument("--out", type=Path, help="Default: benchmarks/results/whole_tune-SHAPE-KERNEL.json")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print("RESULT " + json.dumps(PARTS[args.part](args)), flush=True)
        return
    result: dict[str, Any] = {"shape": SHAPES[args.shape][0].to_dict(), "trials": args.trials, "kernel": args.kernel}
    with tempfile.TemporaryDirectory(prefix="moeopt-bench-") as folder:
        work = Path(folder)
        result["cold"] = _tuned("cold", work)
        print_run("cold Triton cache", result["cold"])
        if not args.skip_warm:
            result["warm"] = _tuned("warm", work)
            print_run("another shape, warm Triton cache", result["warm"])
        if not args.skip_published:
            result["published"] = _run("published", work)
            print_published(result["published"], result["cold"]["wall_s"])
        if not args.skip_agreement:
            result["agreement"] = _run("agreement", work)
            print_agreement(result["agreement"])
    result["bars"] = bars(result, SHAPES[args.shape][2])
    result["machine"] = {**machine_facts(None), **result["cold"]["machine"]}
    for name, (value, bar, held) in result["bars"].items():
        print(f"{'holds' if held else 'MISSED'}  {name}: {value} (bar {bar})")
    out = args.out or RESULTS / f"whole_tune-{args.shape}-{args.kernel}.json"
    write_json(out, result)
    print(f"wrote {out}")


def _run(part: str, work: Path) -> dict[str, Any]:
    """Runs one part in a process of its own and adds its wall time, from start to end."""
    cache = work / ("published-cache" if part == "published" else "cache")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "MOEOPT_BENCH_START": repr(time.time())}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.whole_tune", *sys.argv[1:], "--part", part, "--work", str(work)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    wall = time.monotonic() - start
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    if done.returncode != 0 or line is None:
        sys.exit(f"part {part} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return {"wall_s": round(wall, 3), **found}


def _tuned(part: str, work: Path) -> dict[str, Any]:
    run = _run(part, work)
    return {**run, "where_s": {name: round(seconds, 3) for name, seconds in where(run).items()}}


# -- the tune ----------------------------------------------------------------------------------------


def part_tune(args: argparse.Namespace, shape: MoEShape, name: str) -> dict[str, Any]:
    """One tune in this process: import, open, tune, export, close."""
    born = float(os.environ["MOEOPT_BENCH_START"])
    spent: dict[str, float] = {}

    def timed(what: str, action: Callable[[], Any]) -> Any:
        start = time.monotonic()
        value = action()
        spent[what] = time.monotonic() - start
        return value

    from moeopt.devices import open_device
    from moeopt.measure.options import DeviceOptions
    from moeopt.result import TuneResult
    from moeopt.storage.store import StudyStore
    from moeopt.tuning.options import TuneOptions
    from moeopt.tuning.tuner import Tuner

    # This file's own imports are moeopt's, too: what has passed is Python's start and the import.
    spent["python and import"] = time.time() - born
    sizes = tuple(args.batch_sizes)
    device = timed("open", lambda: open_device("cuda:0", shape, DeviceOptions(kernel=args.kernel), batch_sizes=sizes))
    try:
        # A tune imports these when it first needs them, which is now, while the compile processes start. Done
        # here, so that the times of search and storage are their own.
        timed("import of Optuna, SciPy", import_libraries)
        with StudyStore(str(args.work / f"{name}.db")) as store:
            options = TuneOptions(batch_sizes=sizes, trials=args.trials, seed=args.seed)
            tuner = timed("space", lambda: Tuner(device, store, options))
            result = timed("tune", lambda: TuneResult.of(tuner.run()))
            timed("export", lambda: result.export("sglang", args.work / f"{name}-files"))
        statistics_ = device.statistics().to_dict()
        facts = device.worker_facts
        counts = device.pool.counts
    finally:
        timed("close", device.close)
    wall = time.time() - born
    tuned = result.to_dict()
    return {
        "shape": shape.to_dict(),
        "inside_s": round(wall, 3),
        "spent_s": {key: round(value, 3) for key, value in spent.items()},
        "tune_s": tuned["timings"],
        "counts": tuned["counts"],
        "geomean_speedup": result.geomean_speedup(),
        "roofline_share": {str(m): row.roofline_fraction for m, row in sorted(result.rows.items())},
        "device": statistics_,
        "gpu_busy_share": round(statistics_["gpu_s"] / wall, 4),
        "compile": {
            "asked": counts.asked,
            "compiled": counts.compiled,
            "failed": counts.failed,
            "cpu_s": round(sum(counts.seconds), 1),
        },
        "worker": {"open_s": facts.open_s, "timing": facts.timing},
        "machine": machine_facts(device.spec.gpu),
        "batch_sizes": tuned["batch_sizes"],
    }


def import_libraries() -> None:
    """Imports what storing and searching need."""
    import alembic.command  # noqa: F401

    import moeopt.search.surrogate
    import moeopt.storage.rdb  # noqa: F401


def where(run: dict[str, Any]) -> dict[str, float]:
    """Where the wall time went: seconds that add up to it.

    Compiling is beside the rest, in other processes: what shows here is the waiting for it.
    """
    spent, tune, device = run["spent_s"], run["tune_s"], run["device"]
    parts = {
        "import": spent["python and import"] + spent["import of Optuna, SciPy"],
        "open": spent["open"],
        "wait for the worker": device["start_s"],
        "wait for compiles": device["wait_s"],
        "timing": device["timing_s"] - device["control_s"],
        "control config": device["control_s"],
        "search": tune.get("search", 0.0) + spent["space"],
        "storage": tune.get("storage", 0.0),
        "export": spent["export"],
        "close": spent["close"],
    }
    return {**parts, "rest": run["wall_s"] - sum(parts.values())}


def print_run(title: str, run: dict[str, Any]) -> None:
    """Where the time of a tune went."""
    device, wall = run["device"], run["wall_s"]
    rows = [("wall, from the start of the process to its end", f"{wall:.1f} s")]
    rows += [(f"  {key}", f"{value:.2f} s, {100 * value / wall:4.1f} %") for key, value in where(run).items()]
    rows += [
        ("GPU busy", f"{device['gpu_s']:.2f} s, {100 * run['gpu_busy_share']:.0f} % of the wall time"),
        ("timed", f"{device['timed']} ({device['timed_again']} again)"),
        ("compiled beside it", f"{run['compile']['compiled']} in {run['compile']['cpu_s']:.0f} s of CPU"),
        ("compiled in the GPU process", str(device["compiled_in_worker"])),
        ("speed-up over the default", f"{run['geomean_speedup'] or 0:.2f}x"),
    ]
    print(f"\n{title}\n{table(('', ''), rows)}")


# -- the published procedure -------------------------------------------------------------------------


def part_published(args: argparse.Namespace) -> dict[str, Any]:
    """The published procedure on a random sample of configs, scaled to the whole space."""
    import torch

    from moeopt.kernels import get_kernel
    from moeopt.kernels.layer import make_batch, make_layer
    from moeopt.kernels.quant import compute_dtype
    from moeopt.kernels.routing import Routing

    shape, sizes = SHAPES[args.shape][0], args.batch_sizes
    gpu, kernel = GpuSpec.detect(0), get_kernel(args.kernel)
    legal = [
        c
        for c in SearchSpace.grid(shape).configs()
        if all(kernel.illegal_reason(c, shape, role, gpu) is None for role in ROLES)
    ]
    sample = random.Random(args.seed).sample(legal, min(args.sample, len(legal)))
    torch.cuda.set_device(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    layer = make_layer(shape, device="cuda:0", seed=0)
    out = {
        role: torch.empty(
            max(sizes) * shape.top_k * shape.output_rows(role), dtype=compute_dtype(shape), device="cuda:0"
        )
        for role in ROLES
    }
    routing = Routing.parse("uniform")
    compiling: list[float] = []
    timing: dict[int, list[float]] = {m: [] for m in sizes}
    failed = 0
    for m in sizes:
        ids = routing.draw(shape, m, PER_GRAPH, 0)
        batches = {role: [make_batch(layer, role, torch.from_numpy(i), seed=0) for i in ids] for role in ROLES}
        torch.cuda.synchronize()
        for config in sample:
            start = time.monotonic()
            try:
                launches = [
                    kernel.bind(
                        layer, role, batches[role][i], config,
                        out[role][: m * shape.top_k * shape.output_rows(role)].view(-1, shape.output_rows(role)),
                    )
                    for i in range(PER_GRAPH)
                    for role in ROLES
                ]  # fmt: skip
                for launch in launches[: len(ROLES)]:
                    launch()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  (the published scripts go on after any error, too)
                print(f"{config}: {error}", file=sys.stderr)
                failed += m == sizes[0]
                continue
            first = time.monotonic() - start
            start = time.monotonic()
            _published_timing(launches)
            timing[m].append(time.monotonic() - start)
            # The first batch size compiles; what later ones need beyond it (M=1, odd M) is compiling, too.
            compiling.append(first)
    per_config = sum(compiling) / len(sample)
    per_launches = {m: statistics.fmean(values) for m, values in timing.items() if values}
    total = len(legal) * (per_config + sum(per_launches.values()))
    spread = [sum(timing[m][i] for m in sizes if i < len(timing[m])) for i in range(len(sample))]
    error = statistics.stdev(spread) / len(spread) ** 0.5 * len(legal) if len(spread) > 1 else 0.0
    return {
        "legal_configs": len(legal),
        "sample": len(sample),
        "failed": failed,
        "compile_s_per_config": round(per_config, 3),
        "timing_s_per_config": {str(m): round(v, 4) for m, v in per_launches.items()},
        "scaled_s": round(total, 1),
        "standard_error_s": round(error, 1),
        "how": (
            f"{len(sample)} random legal configs, compiled one after the other in one process and timed at every batch "
            f"size with {PREPARE + PER_GRAPH * (WARM_UPS + REPLAYS)} launches of both projections; the mean times all "
            f"{len(legal)} legal configs of the grid; configs that do not fit the GPU are not counted, though the "
            "published scripts compile them, too"
        ),
    }


def _published_timing(launches: list[Callable[[], None]]) -> None:
    import torch

    for launch in launches:  # PREPARE
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    for _ in range(WARM_UPS):
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
    graph.reset()


def print_published(published: dict[str, Any], wall: float) -> None:
    """Both procedures side by side."""
    scaled = published["scaled_s"]
    print(
        f"\npublished procedure: {published['compile_s_per_config']:.2f} s to compile and "
        f"{sum(published['timing_s_per_config'].values()):.2f} s to time per config, "
        f"{scaled / 60:.0f} ± {published['standard_error_s'] / 60:.0f} minutes for "
        f"{published['legal_configs']} configs: {scaled / wall:.0f} times ours\n({published['how']})"
    )


# -- agreement with do_bench -------------------------------------------------------------------------


def part_agreement(args: argparse.Namespace) -> dict[str, Any]:
    """The worker's times beside do_bench's, in turn; the rows go to a file of their own."""
    from benchmarks import agreement

    rows, found = agreement.run(sorted(agreement.SHAPES))
    folder = args.out.parent if args.out else RESULTS
    path = folder / f"agreement-{found['machine']['gpu'].replace(' ', '_')}.json"
    write_json(path, found)
    return {
        "timing": found["timing"], "worst_over_50_us": found["worst_over_50_us"], "machine": found["machine"],
        "table": agreement.report(rows), "file": path.name,
    }  # fmt: skip


def print_agreement(found: dict[str, Any]) -> None:
    """Both timings of every launch."""
    print(f"\nthe worker's times and do_bench's, in turn, µs per launch ({found['timing']}, {found['file']})")
    print(found.pop("table"))


def bars(result: dict[str, Any], cold_bar: float) -> dict[str, tuple[Any, Any, bool]]:
    """Each bar: what was found, what it should be, whether it holds."""
    found: dict[str, tuple[Any, Any, bool]] = {}
    if "cold" in result:
        cold = result["cold"]
        wall, spent = cold["wall_s"], cold["where_s"]
        overhead = (spent["search"] + spent["storage"]) / wall
        found["cold tune, s"] = (round(wall, 1), cold_bar, wall <= cold_bar)
        found["search and storage, share"] = (round(overhead, 3), OVERHEAD_BAR, overhead < OVERHEAD_BAR)
        compiled = cold["device"]["compiled_in_worker"]
        found["kernels compiled in the GPU process"] = (compiled, 0, compiled == 0)
    if "warm" in result:
        warm = result["warm"]["wall_s"]
        found["warm tune, s"] = (round(warm, 1), WARM_BAR_S, warm <= WARM_BAR_S)
    if "published" in result:
        times = result["published"]["scaled_s"] / result["cold"]["wall_s"]
        found["times as fast as the published procedure"] = (round(times, 1), SPEEDUP_BAR, times >= SPEEDUP_BAR)
    worst = result.get("agreement", {}).get("worst_over_50_us")
    if worst is not None:
        found["disagreement with do_bench over 50 µs"] = (round(worst, 4), AGREEMENT_BAR, worst <= AGREEMENT_BAR)
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "cold": lambda args: part_tune(args, SHAPES[args.shape][0], "cold"),
    "warm": lambda args: part_tune(args, SHAPES[args.shape][1], "warm"),
    "published": part_published,
    "agreement": part_agreement,
}

if __name__ == "__main__":
    main()
