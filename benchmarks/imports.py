"""What ``import moeopt`` adds to Optuna's own import.

    python -m benchmarks.imports

Fresh processes, in turn: Python alone, with Optuna, and with Optuna and moeopt. The medians of the
differences between neighbours are what each adds: wall time, and seconds of CPU, which other work on the
machine does not stretch as much. The bar is 0.3 s of wall time for moeopt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_run import RESULTS, machine_facts, write_json

BAR_S = 0.3
CODES = {"python": "pass", "optuna": "import optuna", "moeopt": "import optuna, moeopt"}


def seconds(code: str) -> tuple[float, float]:
    """Wall time and CPU time of a Python process that runs this."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def added(rounds: Sequence[dict[str, tuple[float, float]]], before: str, name: str) -> dict[str, float]:
    """Medians over the rounds of what one import adds to another."""
    more = [[a - b for a, b in zip(r[name], r[before], strict=True)] for r in rounds]
    wall, cpu = (round(statistics.median(values), 3) for values in zip(*more, strict=True))
    return {"wall_s": wall, "cpu_s": cpu}


def main(argv: Sequence[str] | None = None) -> int:
    """Times the imports, prints and writes them; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS / "imports.json")
    args = parser.parse_args(argv)
    for code in CODES.values():  # reads the files, and writes what Python keeps of them
        seconds(code)
    rounds = [{name: seconds(code) for name, code in CODES.items()} for _ in range(args.rounds)]
    optuna, moeopt = added(rounds, "python", "optuna"), added(rounds, "optuna", "moeopt")
    held = moeopt["wall_s"] < BAR_S
    print(
        f"import optuna: {optuna['wall_s']:.2f} s ({optuna['cpu_s']:.2f} s of CPU); moeopt beyond it: "
        f"{moeopt['wall_s']:.2f} s ({moeopt['cpu_s']:.2f} s of CPU; bar {BAR_S} s: {'holds' if held else 'MISSED'})"
    )
    facts = machine_facts(None)
    facts["versions"]["optuna"] = importlib.metadata.version("optuna")
    write_json(
        args.json,
        {
            "benchmark": "imports", "machine": facts, "processor": platform.processor() or platform.machine(),
            "load": round(os.getloadavg()[0], 1), "bar_s": BAR_S, "optuna": optuna, "moeopt": moeopt,
            "rounds": [{name: [round(value, 3) for value in values] for name, values in r.items()} for r in rounds],
        },
    )  # fmt: skip
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
