"""What a warm L2 would have picked: the same configs timed with weights in L2 and from memory.

    python -m benchmarks.warm_l2 --batch-sizes 1 4 16

Both devices time the same sample of the grid's configs. For each batch size and projection the table
has the config that is best warm, what it costs cold beside the best cold config, and how much faster a
warm L2 makes it look.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from benchmarks.gpu_run import RESULTS, machine_facts, table, write_json
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job
from moeopt.devices import open_device
from moeopt.measure.options import DeviceOptions


def main() -> None:
    """Times the sample both ways, prints and writes the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--sample", type=int, default=60, help="Configs with BLOCK_SIZE_M 16.")
    parser.add_argument("--json", type=Path, default=RESULTS / "warm_l2.json")
    args = parser.parse_args()
    shape = MoEShape(256, 8, 3072, 256)
    times: dict[bool, dict[Job, float]] = {}
    facts = {}
    for warm in (False, True):
        options = DeviceOptions(kernel="builtin", warm_l2=warm)
        with open_device("cuda:0", shape, options, batch_sizes=tuple(args.batch_sizes)) as device:
            legal = [c for c in device.spec.candidates(SearchSpace.grid(shape).configs()) if c.block_size_m == 16]
            configs = random.Random(0).sample(legal, min(args.sample, len(legal)))
            jobs = [Job(Cell(role, m), config) for config in configs for m in args.batch_sizes for role in ROLES]
            times[warm] = {m.job: m.median_us for m in device.measure(jobs) if m.status == "ok"}
            facts = machine_facts(device.spec.gpu)
    rows, out = [], []
    for m in args.batch_sizes:
        for role in ROLES:
            mine = {w: {j.config: us for j, us in times[w].items() if j.cell == Cell(role, m)} for w in times}
            picked = {w: min(us, key=lambda c, us=us: (us[c], c)) for w, us in mine.items()}
            cold_best, warm_best = mine[False][picked[False]], mine[True][picked[True]]
            cold_of_warm = mine[False].get(picked[True], float("nan"))
            out.append(
                {
                    "batch_size": m,
                    "role": role,
                    "best_cold": _entry(picked[False], cold_best),
                    "best_warm": _entry(picked[True], warm_best),
                    "cold_us_of_best_warm": cold_of_warm,
                }
            )
            rows.append(
                [
                    f"{m} {role}",
                    f"{cold_best:.2f}",
                    str(picked[False]),
                    f"{warm_best:.2f}",
                    str(picked[True]),
                    f"{100 * (cold_of_warm / cold_best - 1):.1f} %",
                ]
            )
    print(table(("M", "best cold µs", "config", "best warm µs", "config", "loss of the warm pick"), rows))
    write_json(args.json, {"benchmark": "warm_l2", "shape": shape.to_dict(), "machine": facts, "rows": out})


def _entry(config: LaunchConfig, us: float) -> dict[str, object]:
    return {"config": config.to_dict(), "us": us}


if __name__ == "__main__":
    main()
