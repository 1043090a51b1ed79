"""What each choice of the search is worth: regret on all recordings with one of them changed.

    python -m benchmarks.ablation [--seeds 3] [--only NAME ...] [--processes 2] [--json OUT]

Prints, for the search as it is and for each change, means over recordings of the mean regret of their batch sizes (%)
after 24 and 12 timed, the paired difference with its standard error, and distinct configs compiled. Only recordings of
other shapes are learned from. ``benchmarks/results/ablation.md`` has the rules that were taken out by such a table.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.search import RECORDINGS, Judge, replay
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import load_landscapes
from moeopt.search.pool_search import PoolOptions, PoolSearch

CHANGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "as it is": {},
    "no compile discount": {"discount": 1.0},
    "5 generations": {"generations": 5},
    "4 generations": {"generations": 4},
    "shortlists of 16": {"shortlist": 16},
    "64 samples": {"samples": 64},
}
POINTS: Final = (12, 24)


def runs(name: str, path: Path, seeds: int) -> list[dict[str, float]]:
    """One row a seed: regret (%) after 12 and 24, that of the worst batch size, configs compiled, generations."""
    judge = Judge(Recording.load(path))
    landscapes = load_landscapes(RECORDINGS, exclude_shape=judge.recording.shape)
    rows = []
    for seed in range(seeds):
        search = PoolSearch(judge.problem(max(POINTS), seed, landscapes), options=PoolOptions(**CHANGES[name]))
        run = replay(judge, search, POINTS)
        row = {f"after {n}": float(np.mean(list(run.regret[n].values()))) for n in POINTS}
        worst = float(max(run.regret[max(POINTS)].values()))
        rows.append({**row, "worst": worst, "compiled": run.compiled, "generations": run.generations})
    return rows


def table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]], base: str) -> str:
    """A Markdown table of changes, each compared with ``base`` on the same recordings."""

    def means(name: str, what: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([np.mean([row[what] for row in rows]) for _, rows in sorted(found[name].items())])

    lines = ["| change | after 24, % | | after 12, % | | worst batch size | compiled |", "|" + " --- |" * 7]
    for name in found:
        cells = [name]
        for n in sorted(POINTS, reverse=True):
            mine, less = means(name, f"after {n}"), means(name, f"after {n}") - means(base, f"after {n}")
            error = less.std(ddof=1) / len(less) ** 0.5 if len(less) > 1 else 0.0
            cells += [f"{mine.mean():.3f}", f"{less.mean():+.3f} +- {error:.3f}"]
        cells += [f"{means(name, 'worst').max():.2f}", f"{means(name, 'compiled').mean():.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the changes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    paths = sorted(RECORDINGS.rglob("*.jsonl.gz"))
    names = list(dict.fromkeys(["as it is", *options.only]))
    tasks = [(name, path) for name in names for path in paths]
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in names}
    with ProcessPoolExecutor(options.processes) as pool:
        results = pool.map(runs, *zip(*tasks, strict=True), [options.seeds] * len(tasks))
        for (name, path), rows in zip(tasks, results, strict=True):
            found[name][path.name] = rows
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found, "as it is"))


if __name__ == "__main__":
    main()
