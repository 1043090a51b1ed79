"""What ``import moeopt`` adds to Optuna's own import.

    python -m benchmarks.imports

Fresh processes, in turn: Python alone, with Optuna, and with Optuna and moeopt. The medians of the
differences between neighbours are what each adds. The bar is 0.3 s for moeopt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_run import RESULTS, machine_facts, write_json

BAR_S = 0.3
CODES = {"python": "pass", "optuna": "import optuna", "moeopt": "import optuna, moeopt"}


def seconds(code: str) -> float:
    """Wall time of a Python process that runs this."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.monotonic() - start


def added(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds of what Optuna adds to Python, and moeopt to both."""
    return {
        "optuna_s": round(statistics.median(r["optuna"] - r["python"] for r in rounds), 3),
        "moeopt_s": round(statistics.median(r["moeopt"] - r["optuna"] for r in rounds), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Times the imports, prints and writes them; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS / "imports.json")
    args = parser.parse_args(argv)
    for code in CODES.values():  # reads the files, and writes what Python keeps of them
        seconds(code)
    rounds = [{name: seconds(code) for name, code in CODES.items()} for _ in range(args.rounds)]
    found = added(rounds)
    held = found["moeopt_s"] < BAR_S
    print(
        f"import optuna: {found['optuna_s']:.2f} s; moeopt beyond it: {found['moeopt_s']:.2f} s "
        f"(bar {BAR_S} s: {'holds' if held else 'MISSED'})"
    )
    facts = machine_facts(None)
    facts["versions"]["optuna"] = importlib.metadata.version("optuna")
    write_json(
        args.json,
        {
            "benchmark": "imports", "machine": facts, "processor": platform.processor() or platform.machine(),
            "load": round(os.getloadavg()[0], 1), "bar_s": BAR_S, **found,
            "rounds": [{name: round(value, 3) for name, value in r.items()} for r in rounds],
        },
    )  # fmt: skip
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
