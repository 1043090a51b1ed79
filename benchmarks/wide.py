"""The wide space, tuned here, against the whole grid's optimum from a recording, both timed in turn on this GPU.

    python -m benchmarks.wide --recording h200-E256-top8-K3072-N256-bf16.jsonl.gz --batch-sizes 1 64 4096

The recording holds every config of the grid, measured on a GPU of the same kind with the same kernel.
Its best split of each batch size, and its best joint config, take turns with what a tune of the wide
space finds, so that all are measured in one run on one GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import moeopt
from benchmarks.gpu_run import RESULTS, machine_facts, table, write_json
from moeopt.devices import DeviceOptions, open_device
from moeopt.measure.base import Cell, Job, Measurement
from moeopt.measure.recording import Recording
from moeopt.search.ledger import Ledger
from moeopt.shape import ROLES
from moeopt.study_file import find_recording
from moeopt.verify import Row, verify


def grid_optimum(recording: Recording, batch_size: int) -> tuple[Row, Row]:
    """The best split and the best joint config of a recording at one batch size."""
    ledger = Ledger(tuple(Cell(role, batch_size) for role in ROLES))
    sums = {}
    for config, row in recording.rows.items():
        if row.status != "ok":
            continue
        measured = [
            Measurement(Job(Cell(role, batch_size), config), "ok", us=row.roles[role].us[batch_size]) for role in ROLES
        ]
        ledger.add(measured)
        sums[config] = sum(m.median_us for m in measured)
    best = ledger.choose()[batch_size]
    joint = min(sums, key=lambda config: (sums[config], config))
    return Row(best["up"].job.config, best["down"].job.config), Row(joint, joint)


def main() -> None:
    """Runs the comparison, prints and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=None)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--space", default="wide")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    recording = Recording.load(find_recording(args.recording))
    sizes = tuple(args.batch_sizes or recording.batch_sizes)
    start = time.monotonic()
    options = DeviceOptions(kernel=str(recording.header["kernel"]).partition(" ")[0])
    with (
        tempfile.TemporaryDirectory() as folder,
        open_device("cuda:0", recording.shape, options, batch_sizes=sizes) as device,
    ):
        if device.gpu.name != recording.gpu.name or device.info.kernel_hash != recording.header.get("kernel_hash"):
            sys.exit(f"the recording is of {recording.gpu.name} and another kernel: record the grid here first")
        result = moeopt.tune(
            batch_sizes=sizes,
            gpu=device,
            space=args.space,
            trials=args.trials,
            seed=args.seed,
            storage=f"{folder}/wide.db",
            progress=False,
        )
        tuned_s = time.monotonic() - start
        optimum = {m: grid_optimum(recording, m) for m in sizes}
        arms = {
            "grid's best joint": {m: optimum[m][1] for m in sizes},
            "grid's best split": {m: optimum[m][0] for m in sizes},
            args.space: {m: Row(row.up.config, row.down.config) for m, row in result.rows.items()},
        }
        verified = verify(device, arms)
    rows, out = [], []
    for row in verified.rows:
        us = {name: row.arm(name).total_us for name in arms}
        joint, split, wide = (us[name] for name in arms)
        out.append(
            {"batch_size": row.batch_size, "us": us, "configs": {n: _configs(arms[n][row.batch_size]) for n in arms}}
        )
        if joint is None or split is None or wide is None:
            rows.append([str(row.batch_size), *("-" if v is None else f"{v:.1f}" for v in us.values()), "-", "-", "-"])
            continue
        chosen = arms[args.space][row.batch_size]
        rows.append(
            [
                str(row.batch_size),
                *(f"{v:.1f}" for v in (joint, split, wide)),
                f"{joint / wide:.3f}",
                f"{split / wide:.3f}",
                f"{chosen.up} | {chosen.down}",
            ]
        )
    print(table(("M", "joint µs", "split µs", f"{args.space} µs", "over joint", "over split", "configs"), rows))
    counts = result.counts
    print(
        f"{args.space} space: {counts.space} configs, {counts.measured} timed in {tuned_s:.1f} s, "
        f"{counts.unique_compiled} distinct configs compiled"
    )
    path = args.json or RESULTS / f"{args.space}-{recording.shape.slug()}.json"
    write_json(
        path,
        {
            "benchmark": "wide",
            "recording": Path(args.recording).name,
            "machine": machine_facts(device.gpu),
            "trials": args.trials,
            "tune_s": round(tuned_s, 2),
            "counts": counts.to_dict(),
            "rows": out,
        },
    )


def _configs(row: Row) -> dict[str, dict[str, int | bool]]:
    return {role: row.config(role).to_dict() for role in ROLES}


if __name__ == "__main__":
    main()
