"""A tune of the wide space, and one of the grid, against the optimum of the whole grid: one run, one GPU.

    python -m benchmarks.wide --shape qwen3.5 --batch-sizes 1 64 4096

First every legal config of the grid is timed for every batch size, as an exhaustive script would, and the
best of that walk are timed again in turn. Then the wide space and the grid are tuned, each in a database
of its own. At last the engine's default, the walk's best joint config and best split, and what the two
tunes chose take turns. ``--gpu recorded:FILE`` rehearses all that without a GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import moeopt
from benchmarks.gpu_run import RESULTS, machine_facts, table, write_json
from benchmarks.whole_tune import SHAPES
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.table import ConfigPair
from moeopt.core.trial import Cell, Job
from moeopt.devices import open_device
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions
from moeopt.result import TuneResult
from moeopt.search.ledger import Ledger
from moeopt.tuning.finalists import find_finalists, time_finalists, with_finals
from moeopt.tuning.verify import DEFAULT_PASSES, Verification, default_table, verify

# Best joint configs of the walk that are timed again.
JOINT_FINALISTS = 3
# In the walk a config this many times slower than its cell's best is timed by one round only.
SLOW = 1.3
DEFAULT, JOINT, SPLIT = "engine's default", "grid's best joint", "grid's best split"
GRID_TUNE, WIDE_TUNE = "tune of the grid", "tune of wide"


def walk(device: Device, batch_sizes: tuple[int, ...]) -> tuple[Ledger, dict[str, Any]]:
    """Times the whole grid; what could be its best is timed again in turn.

    Returns:
        All times, and how many configs, timings and seconds that were.
    """
    start = time.monotonic()
    cells = tuple(Cell(role, m) for m in batch_sizes for role in ROLES)
    ledger = Ledger(cells)
    configs = device.spec.candidates(SearchSpace.grid(device.spec.shape).configs())
    jobs = [Job(cell, config) for config in configs for cell in cells]

    def slow(job: Job, rounds: Any) -> bool:
        best = ledger.incumbent(job.cell)
        return best is not None and statistics.median(rounds) > SLOW * best.median_us

    for measurement in device.measure(jobs, slow):
        ledger.add([measurement])
    walked_s = time.monotonic() - start
    finalists = dict.fromkeys(find_finalists(ledger))
    for m in batch_sizes:
        finalists |= dict.fromkeys(
            Job(Cell(role, m), config) for config in joint_ranking(ledger, m)[:JOINT_FINALISTS] for role in ROLES
        )
    finals = time_finalists(device, list(finalists))
    failed = len(ledger.failed())
    return with_finals(ledger, finals), {
        "configs": len(configs),
        "failed": failed,
        "timed": sum(len(ledger.timed(cell)) for cell in cells),
        "timed_again": len(finals),
        "walk_s": round(walked_s, 2),
        "again_s": round(time.monotonic() - start - walked_s, 2),
    }


def joint_ranking(ledger: Ledger, batch_size: int) -> list[LaunchConfig]:
    """Configs timed in full for both projections, the smallest sum first."""
    up, down = (ledger.full(Cell(role, batch_size)) for role in ROLES)
    return sorted((c for c in up if c in down), key=lambda c: (up[c].median_us + down[c].median_us, c))


def optimum(ledger: Ledger, batch_size: int) -> tuple[ConfigPair, ConfigPair]:
    """The best joint config and the best split of a walk."""
    best = ledger.choose()[batch_size]
    joint = joint_ranking(ledger, batch_size)[0]
    return ConfigPair(joint, joint), ConfigPair(best["up"].job.config, best["down"].job.config)


def tuned(
    device: Device, batch_sizes: tuple[int, ...], space: str, trials: int, seed: int
) -> tuple[TuneResult, dict[str, Any]]:
    """A tune in a database of its own."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        result = moeopt.tune(
            batch_sizes=batch_sizes,
            gpu=device,
            space=space,
            trials=trials,
            seed=seed,
            storage=f"{folder}/{space}.db",
            progress=False,
        )
        facts = {
            "space": space,
            "trials": trials,
            "seconds": round(time.monotonic() - start, 2),
            "counts": result.counts.to_dict(),
        }
    return result, facts


def geomeans(verified: Verification, against: str) -> dict[str, float]:
    """How many times faster each arm is than one of them, over the batch sizes."""
    out = {}
    for arm in verified.rows[0].arms:
        logs = []
        for row in verified.rows:
            theirs, mine = row.arm(against).total_us, row.arm(arm.name).total_us
            if theirs is not None and mine is not None:
                logs.append(math.log(theirs / mine))
        if len(logs) == len(verified.rows):
            out[arm.name] = round(math.exp(statistics.mean(logs)), 4)
    return out


def main() -> None:
    """Runs the comparison, prints and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5")
    parser.add_argument("--gpu", default="cuda:0")
    parser.add_argument("--kernel", default="builtin")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 64, 4096])
    parser.add_argument("--wide-trials", type=int, default=48)
    parser.add_argument("--grid-trials", type=int, default=24)
    parser.add_argument("--passes", type=int, default=DEFAULT_PASSES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = tuple(sorted(args.batch_sizes))
    replayed = args.gpu.startswith("recorded:")
    shape = None if replayed else SHAPES[args.shape][0]
    options = DeviceOptions(kernel="auto" if replayed else args.kernel)
    start = time.monotonic()
    lap = _Lap()
    with open_device(args.gpu, shape, options, batch_sizes=sizes) as device:
        lap("device opened")
        ledger, walked = walk(device, sizes)
        lap(f"grid walked: {walked}")
        wide, wide_facts = tuned(device, sizes, "wide", args.wide_trials, args.seed)
        lap("wide space tuned")
        grid, grid_facts = tuned(device, sizes, "grid", args.grid_trials, args.seed)
        lap("grid tuned")
        best = {m: optimum(ledger, m) for m in sizes}
        arms: Mapping[str, Mapping[int, ConfigPair]] = {
            DEFAULT: default_table(device, sizes),
            JOINT: {m: best[m][0] for m in sizes},
            SPLIT: {m: best[m][1] for m in sizes},
            GRID_TUNE: {m: row.pair for m, row in grid.rows.items()},
            WIDE_TUNE: {m: row.pair for m, row in wide.rows.items()},
        }
        verified = verify(device, arms, passes=args.passes)
        lap(f"all five in turn, {verified.passes} passes")
        gpu, info, measured_shape = device.spec.gpu, device.spec.provenance, device.spec.shape
    rows = [
        [
            str(row.batch_size),
            *(f"{us:.1f}" if us is not None else "-" for us in (row.arm(name).total_us for name in arms)),
            *(_ratio(row.arm(SPLIT).total_us, row.arm(name).total_us) for name in (GRID_TUNE, WIDE_TUNE)),
        ]
        for row in verified.rows
    ]
    print(table(("M", *(f"{name} µs" for name in arms), "split/grid tune", "split/wide tune"), rows))
    for name in (WIDE_TUNE, SPLIT):
        for m in sizes:
            print(f"{name}, M={m}: up {arms[name][m].up}, down {arms[name][m].down}")
    over = {against: geomeans(verified, against) for against in (DEFAULT, JOINT, SPLIT)}
    for against, ratios in over.items():
        print(f"times faster than {against}, geomean: {ratios}")
    for facts in (wide_facts, grid_facts):
        counts = facts["counts"]
        print(
            f"{facts['space']}: {counts['space']} configs, {counts['measured']} timed, {counts['unique_compiled']} "
            f"compiled, {facts['seconds']} s"
        )
    path = args.json or RESULTS / f"wide-{measured_shape.slug()}.json"
    write_json(
        path,
        {
            "benchmark": "wide",
            "shape": measured_shape.to_dict(),
            "source": info.source,
            "kernel": [info.kernel, info.kernel_version, info.kernel_hash],
            "machine": machine_facts(gpu),
            "seed": args.seed,
            "wall_s": round(time.monotonic() - start, 2),
            "walk": walked,
            "tunes": [wide_facts, grid_facts],
            "passes": verified.passes,
            "disturbed": verified.disturbed,
            "geomean_faster_than": over,
            "batch_sizes": verified.to_dict()["batch_sizes"],
        },
    )


def _ratio(theirs: float | None, mine: float | None) -> str:
    return f"{theirs / mine:.3f}" if theirs is not None and mine is not None else "-"


class _Lap:
    """Prints what was done and the seconds since the last time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def __call__(self, what: str) -> None:
        now = self._clock()
        print(f"-- {what}: {now - self._last:.1f} s", flush=True)
        self._last = now


if __name__ == "__main__":
    main()
