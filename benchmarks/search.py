"""How good a search is, replayed on recordings of whole landscapes.

    python -m benchmarks.search --recording FILE --trials 24 --seeds 5 --json OUT
    python -m benchmarks.search --all --json OUT      # every recording; benchmarks.search_report makes table and plot
    python -m benchmarks.search --speed               # what a suggestion costs at 1,000 observations

Regret of a batch size: (up + down with a shared BLOCK_SIZE_M, as chosen) / (best split of the recording) - 1,
with the recording's medians. Only recordings of other shapes may be learned from: that of the replayed
shape is left out, on whatever GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.descent import CoordinateDescent
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import Landscape, load_landscapes
from moeopt.search.ledger import Ledger
from moeopt.search.optuna_strategy import OptunaStrategy
from moeopt.search.pool_search import PoolOptions, PoolSearch
from moeopt.search.strategy import SearchProblem, Strategy

RECORDINGS = Path(__file__).parent.parent / "studies" / "recordings"


class Judge:
    """The whole truth about a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.device = RecordedDevice(recording)
        self.landscape = Landscape.from_recording(recording)
        self.space = SearchSpace.grid(recording.shape)
        self.candidates = tuple(self.device.spec.candidates(self.space.configs()))
        self.cells = tuple(Cell(role, m) for m in recording.batch_sizes for role in ROLES)
        self.us: dict[Cell, dict[LaunchConfig, float]] = {}
        for cell, row in zip(self.landscape.cells, self.landscape.us, strict=True):
            times = zip(self.landscape.configs, row.astype(float), strict=True)
            self.us[cell] = {c: us for c, us in times if math.isfinite(us)}
        self.best_split: dict[int, float] = {}
        self.best_joint: dict[int, float] = {}
        for m in recording.batch_sizes:
            up, down = self.us[Cell("up", m)], self.us[Cell("down", m)]
            blocks = sorted({c.block_size_m for c in up} & {c.block_size_m for c in down})
            self.best_split[m] = min(
                min(us for c, us in up.items() if c.block_size_m == b)
                + min(us for c, us in down.items() if c.block_size_m == b)
                for b in blocks
            )
            self.best_joint[m] = min(us + down[c] for c, us in up.items() if c in down)

    def problem(self, trials: int, seed: int, landscapes: Sequence[Landscape]) -> SearchProblem:
        """What a tune of this recording would be given."""
        return SearchProblem(
            shape=self.recording.shape,
            gpu=self.recording.gpu,
            space=self.space,
            mode="split",
            cells=self.cells,
            candidates=self.candidates,
            trials=trials,
            seed=seed,
            defaults={c: self.device.spec.default_config(c.roles[0], c.batch_size) for c in self.cells},
            landscapes=landscapes,
        )

    def chosen_us(self, ledger: Ledger) -> dict[int, float]:
        """Per batch size the true sum of what was chosen; infinite where nothing was."""
        out = {}
        for m in self.recording.batch_sizes:
            parts = ledger.choose().get(m, {})
            out[m] = (
                sum(self.us[Cell(role, m)][parts[role].job.config] for role in ROLES) if len(parts) == 2 else math.inf
            )
        return out


@dataclass
class Run:
    """One replay.

    Attributes:
        regret: After so many configs timed per cell, per batch size, in percent.
        versus_joint: Per batch size, time of the best joint config over the chosen split's.
        compiled: Distinct configs asked for.
        generations: Times that the strategy was asked.
        timed: Mean configs timed per cell.
        search_s: CPU seconds of the whole replay: the strategy, and a little for the recording.
    """

    regret: dict[int, dict[int, float]]
    versus_joint: dict[int, float]
    compiled: int
    generations: int
    timed: float
    most_timed: int
    search_s: float


def replay(judge: Judge, strategy: Strategy, points: Sequence[int]) -> Run:
    """Runs a strategy to its end on a recording."""
    order: list[Measurement] = []
    generations, spent = 0, time.process_time()
    while jobs := strategy.ask():
        generations += 1
        for measurement in judge.device.measure(jobs, strategy.race):
            strategy.tell([measurement])
            order.append(measurement)
    spent = time.process_time() - spent
    regret: dict[int, dict[int, float]] = {}
    for point in points:
        ledger, count = Ledger(judge.cells), dict.fromkeys(judge.cells, 0)
        for m in order:
            if not m.us or count[m.job.cell] < point:
                ledger.add([m])
                count[m.job.cell] += bool(m.us)
        us = judge.chosen_us(ledger)
        regret[point] = {m: 100 * (us[m] / judge.best_split[m] - 1) for m in us}
    us = judge.chosen_us(strategy.ledger)
    timed = [len(strategy.ledger.timed(cell)) for cell in judge.cells]
    return Run(
        regret=regret,
        versus_joint={m: judge.best_joint[m] / us[m] for m in us},
        compiled=len({m.job.config for m in order}),
        generations=generations,
        timed=statistics.mean(timed),
        most_timed=max(timed),
        search_s=spent,
    )


Method = Callable[[Judge, int, int, Sequence[Landscape]], Strategy]


def ours(judge: Judge, trials: int, seed: int, landscapes: Sequence[Landscape], **options: Any) -> Strategy:
    """moeopt's search with recordings of other shapes."""
    return PoolSearch(judge.problem(trials, seed, landscapes), options=PoolOptions(**options))


def ours_alone(judge: Judge, trials: int, seed: int, landscapes: Sequence[Landscape]) -> Strategy:
    """moeopt's search with nothing but the shape and the GPU's data sheet."""
    return PoolSearch(judge.problem(trials, seed, ()))


def with_sampler(make: Callable[[int], Any]) -> Method:
    """A stock Optuna sampler, asked one config at a time (its best case)."""

    def method(judge: Judge, trials: int, seed: int, landscapes: Sequence[Landscape]) -> Strategy:
        return OptunaStrategy(judge.problem(trials, seed, ()), make(seed), batch=1)

    return method


def _random(seed: int) -> Any:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _tpe(seed: int) -> Any:
    from optuna.samplers import TPESampler

    return TPESampler(multivariate=True, seed=seed)


def _gp(seed: int) -> Any:
    from optuna.samplers import GPSampler

    return GPSampler(seed=seed)


def descent(judge: Judge, trials: int, seed: int, landscapes: Sequence[Landscape]) -> Strategy:
    """Coordinate descent from the engine's default."""
    return CoordinateDescent(judge.problem(trials, seed, ()))


METHODS: dict[str, Method] = {
    "ours": ours,
    "ours alone": ours_alone,
    "coordinate descent": descent,
    "random": with_sampler(_random),
    "Optuna TPE": with_sampler(_tpe),
    "Optuna GPSampler": with_sampler(_gp),
}
SLOW = {"Optuna GPSampler": 1}


@dataclass
class Row:
    """One method on one recording, means over seeds."""

    method: str
    seeds: int
    mean: float
    worst: float
    per_batch_size: dict[int, float]
    curve: dict[int, float]
    geomean_vs_joint: float
    worst_vs_joint: float
    compiled: float
    generations: float
    timed: float
    most_timed: int
    search_s: float
    runs: list[Run] = field(default_factory=list, repr=False)


def summarise(name: str, runs: Sequence[Run], trials: int) -> Row:
    """Means over runs."""
    sizes = list(runs[0].versus_joint)
    per = {m: statistics.mean(r.regret[trials][m] for r in runs) for m in sizes}
    curve = {p: statistics.mean(statistics.mean(r.regret[p].values()) for r in runs) for p in runs[0].regret}
    ratios = [v for r in runs for v in r.versus_joint.values()]
    return Row(
        method=name,
        seeds=len(runs),
        mean=statistics.mean(per.values()),
        worst=max(per.values()),
        per_batch_size=per,
        curve=curve,
        geomean_vs_joint=math.exp(statistics.mean(map(math.log, ratios))) if min(ratios) > 0 else 0.0,
        worst_vs_joint=100 * (1 / min(ratios) - 1) if min(ratios) > 0 else math.inf,
        compiled=statistics.mean(r.compiled for r in runs),
        generations=statistics.mean(r.generations for r in runs),
        timed=statistics.mean(r.timed for r in runs),
        most_timed=max(r.most_timed for r in runs),
        search_s=statistics.mean(r.search_s for r in runs),
        runs=list(runs),
    )


def evaluate(judge: Judge, methods: Sequence[str], trials: int, seeds: int) -> list[Row]:
    """All methods on one recording."""
    landscapes = load_landscapes(RECORDINGS, exclude_shape=judge.recording.shape)
    points = sorted({*(p for p in (4, 8, 12, 16, 20, 24, 32, 48) if p < trials), trials})
    rows = []
    for name in methods:
        runs = [
            replay(judge, METHODS[name](judge, trials, seed, landscapes), points)
            for seed in range(SLOW.get(name, seeds) if seeds > 1 else 1)
        ]
        rows.append(summarise(name, runs, trials))
        print(format_row(rows[-1]), flush=True)
    return rows


def grid_row(judge: Judge) -> Row:
    """The exhaustive grid, one config for both roles: what the published scripts export."""
    per = {m: 100 * (judge.best_joint[m] / judge.best_split[m] - 1) for m in judge.best_split}
    count = len(judge.candidates)
    return Row("exhaustive grid, joint", 1, statistics.mean(per.values()), max(per.values()), per, {}, 1.0, 0.0,
               count, 1, count, count, 0.0)  # fmt: skip


HEAD = (
    f"{'method':24} {'seeds':>5} {'timed':>6} {'mean %':>8} {'worst %':>8} {'vs joint':>8} {'worst vs':>8} "
    f"{'compiled':>8} {'gens':>5} {'s':>6}  mean % after so many timed"
)


def format_row(row: Row) -> str:
    """A line of the table."""
    curve = "  ".join(f"{p}: {v:.2f}" for p, v in row.curve.items())
    return (
        f"{row.method:24} {row.seeds:5d} {row.timed:6.1f} {row.mean:8.3f} {row.worst:8.3f} {row.geomean_vs_joint:8.4f} "
        f"{row.worst_vs_joint:7.2f}% {row.compiled:8.1f} {row.generations:5.1f} {row.search_s:6.2f}  {curve}"
    )


def bars(
    recording: Recording, rows: Sequence[Row], twelve: Row | None, joint: Row
) -> list[tuple[str, float, float, bool]]:
    """(what, figure, bar, held) for 24 trials."""
    by = {row.method: row for row in rows}
    out = []
    if "ours" in by:
        row = by["ours"]
        out += [
            ("24 timed: mean regret %", row.mean, 0.3, row.mean <= 0.3),
            ("24 timed: worst batch size's mean %", row.worst, 1.0, row.worst <= 1.0),
            ("slower than the best joint config, worst %", row.worst_vs_joint, 0.5, row.worst_vs_joint <= 0.5),
            ("distinct configs compiled", max(r.compiled for r in row.runs), 150,
             max(r.compiled for r in row.runs) <= 150),
            ("most configs timed in a cell", row.most_timed, 24, row.most_timed <= 24),
        ]  # fmt: skip
        if recording.shape.block_shape:
            gain = 100 * (row.geomean_vs_joint - 1)
            most = 100 * (math.exp(statistics.mean(math.log(1 + v / 100) for v in joint.per_batch_size.values())) - 1)
            what = f"faster than the best joint config, geomean % (the best split: {most:.2f})"
            out.append((what, gain, 5.0, gain >= 5.0))
    if twelve is not None:
        out.append(("12 timed: mean regret %", twelve.mean, 1.0, twelve.mean <= 1.0))
    if "ours alone" in by:
        row = by["ours alone"]
        out.append(("24 timed, no recordings: mean regret %", row.mean, 1.5, row.mean <= 1.5))
    return out


def run_recording(path: Path, methods: Sequence[str], trials: int, seeds: int) -> dict[str, Any]:
    """Everything about one recording, printed and as JSON."""
    judge = Judge(Recording.load(path))
    sizes = ", ".join(map(str, judge.recording.batch_sizes))
    print(f"\n{path.name}: {len(judge.candidates)} legal configs, batch sizes {sizes}, {trials} trials")
    print(HEAD)
    rows = evaluate(judge, methods, trials, seeds)
    rows.append(grid_row(judge))
    print(format_row(rows[-1]))
    twelve = None
    if "ours" in methods and trials == 24:
        landscapes = load_landscapes(RECORDINGS, exclude_shape=judge.recording.shape)
        twelve = summarise(
            "ours, 12", [replay(judge, ours(judge, 12, s, landscapes), [4, 8, 12]) for s in range(seeds)], 12
        )
        print(format_row(twelve))
    held = bars(judge.recording, rows, twelve, rows[-1]) if trials == 24 else []
    for what, figure, bar, ok in held:
        print(f"  {'holds ' if ok else 'MISSED'}  {what}: {figure:.3f} (bar {bar:g})")
    ours_row = next((r for r in rows if r.method == "ours"), None)
    if ours_row is not None:
        per = "  ".join(f"{m}: {v:.2f}" for m, v in ours_row.per_batch_size.items())
        print(f"  ours per batch size, mean %: {per}")
    return {
        "recording": path.name,
        "shape": judge.recording.shape.to_dict(),
        "trials": trials,
        "learned_from": [s.shape.slug() for s in load_landscapes(RECORDINGS, exclude_shape=judge.recording.shape)],
        "rows": [{k: v for k, v in asdict(r).items() if k != "runs"} for r in [*rows, *([twelve] if twelve else [])]],
        "bars": [{"what": w, "figure": f, "bar": b, "holds": ok} for w, f, b, ok in held],
    }


def speed(path: Path, observations: int = 1000, repeats: int = 9) -> list[dict[str, Any]]:
    """What one generation of suggestions costs when so much is known: CPU time, least of some repeats."""
    judge = Judge(Recording.load(path))
    cells = judge.cells
    rng = np.random.default_rng(0)
    each = -(-observations // len(cells))
    pool = rng.choice(len(judge.candidates), 4 * each, replace=False)
    known = {}
    for cell in cells:
        jobs = [Job(cell, judge.candidates[i]) for i in sorted(rng.choice(pool, each, replace=False))]
        known[cell] = list(judge.device.measure(jobs))
    landscapes = load_landscapes(RECORDINGS, exclude_shape=judge.recording.shape)
    problem = replace(judge.problem(each + 24, 0, landscapes), known=known)
    took = []
    for strategy in [PoolSearch(problem) for _ in range(repeats)]:
        start = time.process_time()
        jobs = strategy.ask()
        took.append(1e3 * (time.process_time() - start))
    row = {
        "recording": path.name,
        "observations": sum(map(len, known.values())),
        "cells": len(cells),
        "configs": len(judge.candidates),
        "suggestions": len(jobs),
        "ms_per_cell": min(took) / len(cells),
        "ms_per_cell_median": statistics.median(took) / len(cells),
        "ms_per_suggestion": min(took) / len(jobs),
    }
    print(", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    return [row]


def as_json(results: Sequence[dict[str, Any]]) -> str:
    """Strict JSON, rounded; null where nothing was found yet."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float):
            return round(value, 4) if math.isfinite(value) else None
        return value

    return json.dumps(plain(list(results)), indent=1) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="How good a search is, replayed on recordings.")
    parser.add_argument("--recording", type=Path, action="append", help="a recording; may be given more than once")
    parser.add_argument("--all", action="store_true", help=f"every recording in {RECORDINGS.name}/")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas; names may be shortened")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--speed", action="store_true")
    given = parser.parse_args(arguments)
    paths = sorted(RECORDINGS.glob("*.jsonl.gz")) if given.all or not given.recording else given.recording
    if given.speed:
        costs = [row for path in paths for row in speed(path)]
        if given.json:
            given.json.write_text(as_json(costs))
        return
    asked = [a.strip() for a in given.methods.split(",")]
    methods = [name for name in METHODS if any(name == a or (a not in METHODS and name.startswith(a)) for a in asked)]
    results = [run_recording(path, methods, given.trials, given.seeds) for path in paths]
    if given.json:
        given.json.write_text(as_json(results))


if __name__ == "__main__":
    main(sys.argv[1:])
