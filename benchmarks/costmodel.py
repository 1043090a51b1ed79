"""How well the cost model ranks the configs of recordings, and its fit.

    python -m benchmarks.costmodel RECORDING... [--json OUT]     judged by the fit that leaves each one's layer out
    python -m benchmarks.costmodel --fit                         writes costmodel.npz (needs scikit-learn)

Per cell (role, M): Spearman's rank correlation of predicted and measured times over all configs, the
place of the true best in the predicted order (share of configs predicted faster), and how much slower
than the best is the best among the first 1, 8 and 24 predicted. And per batch size what ``moeopt suggest``
would have chosen, against SGLang's default and the best pair.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.costmodel.formula import launch_parts
from moeopt.costmodel.model import predict_us
from moeopt.costmodel.trees import DEPTH, EVERYTHING, FITTED, Correction, launch_features, pack_correction
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import Landscape, load_landscapes
from moeopt.search.features import squash
from moeopt.tuning.suggest import suggest

Array = NDArray[np.float64]

# How fast a config's weight in the fit falls with its (squashed) excess over the best of its cell, the share of the
# fastest configs that is fitted on, and of that the least for the slow ones.
FALL, SHARE, LEAST = 0.25, 0.8, 0.2
TREES = {
    "max_iter": 150, "learning_rate": 0.12, "max_leaf_nodes": 16, "max_depth": DEPTH, "min_samples_leaf": 100,
    "l2_regularization": 5.0, "max_features": 0.5, "early_stopping": False,
}  # fmt: skip
SHRINK = 0.9
SEEDS = (0, 1)  # so many fits are averaged: what one makes of chance counts half
DECIMALS = 4  # of features in the fit: splits between what differs by rounding alone mean nothing
Score = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class CellData:
    """The measured times of one cell."""

    recording: str
    shape: MoEShape
    gpu: GpuSpec
    role: Role
    batch_size: int
    configs: tuple[LaunchConfig, ...]
    us: Array


def cells_of(path: Path) -> list[CellData]:
    """All cells of a recording."""
    recording = Recording.load(path)
    rows = [row for row in recording.rows.values() if row.status == "ok"]
    configs = tuple(row.config for row in rows)
    return [
        CellData(
            path.name.split(".")[0], recording.shape, recording.gpu, role, m, configs,
            np.array([statistics.median(row.roles[role].us[m]) for row in rows]),
        )
        for role in ROLES
        for m in recording.batch_sizes
    ]  # fmt: skip


def fit(landscapes: Sequence[Landscape]) -> Correction:
    """Trees for log(measured / formula) of the recordings of one architecture, up to a level of a cell."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    found = [_rows(landscape, i) for landscape in landscapes for i in range(len(landscape.cells))]
    x, y, weight = (np.concatenate(part) for part in zip(*found, strict=True))
    trees = []
    for seed in SEEDS:
        model = HistGradientBoostingRegressor(**TREES, random_state=seed)
        model.fit(np.round(x, DECIMALS), y, sample_weight=weight)
        trees += [predictor.nodes for (predictor,) in model._predictors]
    sizes = np.array([len(nodes) for nodes in trees])
    roots = np.cumsum(sizes, dtype=np.int32) - sizes.astype(np.int32)
    found = [_siblings_side_by_side(nodes) for nodes in trees]
    feature, threshold, left, value = (np.concatenate(part) for part in zip(*found, strict=True))
    return Correction(roots, feature, threshold, left + np.repeat(roots, sizes), value)


def _siblings_side_by_side(nodes: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Feature, threshold, left child and value of one tree's nodes, in an order where the right child is the next."""
    feature, left = np.zeros(len(nodes), dtype=np.int32), np.arange(len(nodes), dtype=np.int32)
    threshold, value = np.full(len(nodes), np.inf, dtype=np.float32), np.zeros(len(nodes), dtype=np.float32)
    waiting, free = [(0, 0)], 1
    for old, new in waiting:
        node = nodes[old]
        if node["is_leaf"]:
            value[new] = SHRINK / len(SEEDS) * node["value"]
        else:
            feature[new], threshold[new], left[new] = node["feature_idx"], node["num_threshold"], free
            waiting += [(node["left"], free), (node["right"], free + 1)]
            free += 2
    return feature, threshold, left, value


def _rows(landscape: Landscape, number: int) -> tuple[Array, Array, Array]:
    """Features, log(measured / formula) less its mean, and weights of some configs of one cell."""
    shape, cell = landscape.shape, landscape.cells[number]
    (role,) = cell.roles
    logs = np.log(landscape.us[number], dtype=np.float64)
    ran = np.flatnonzero(np.isfinite(logs))
    weight = np.exp(-squash(logs[ran] - logs[ran].min()) / FALL)
    rng = np.random.default_rng(zlib.crc32(f"{shape.slug()} {cell}".encode()))
    kept = rng.random(len(ran)) < np.maximum(weight, LEAST) * SHARE
    ran, weight = ran[kept], weight[kept]
    parts = launch_parts(shape, landscape.gpu, role, cell.batch_size, landscape.table[ran, :7].astype(np.float64))
    missed = logs[ran] - np.log(parts.us)
    return (
        np.column_stack([launch_features(shape, role, cell.batch_size, parts), np.log2(landscape.table[ran, 3])]),
        missed - np.average(missed, weights=weight),
        weight,
    )


def write_fits(landscapes: Sequence[Landscape], path: Path) -> None:
    """One fit without each layer, and one of everything, into one file."""
    arrays = {}
    for without in [None, *dict.fromkeys(landscape.shape for landscape in landscapes)]:
        name = EVERYTHING if without is None else without.slug()
        correction = fit([landscape for landscape in landscapes if landscape.shape != without])
        arrays |= {f"{name}/{key}": value for key, value in pack_correction(correction).items()}
        print(name, file=sys.stderr, flush=True)
    np.savez_compressed(path, **arrays)


def judge(cell: CellData, predicted: Array) -> Score:
    """Spearman's correlation, place of the best, and regret after the first 1, 8 and 24."""
    best = int(np.argmin(cell.us))
    order = np.argsort(predicted, kind="stable")
    regrets = [float(cell.us[order[:n]].min() / cell.us[best] - 1) for n in (1, 8, 24)]
    place = float(np.mean(predicted < predicted[best]))
    return float(spearmanr(predicted, cell.us).statistic), place, regrets[0], regrets[1], regrets[2]


@dataclass(frozen=True)
class Suggested:
    """What became of a suggestion on a recording; µs of both projections, None where a config did not run.

    Attributes:
        recording: Its name.
        batch_size: Tokens.
        up: Suggested for the up projection.
        down: Suggested for the down projection.
        us: The suggestion's.
        default_us: SGLang's default's.
        best_us: Of the best pair with one BLOCK_SIZE_M.
    """

    recording: str
    batch_size: int
    up: str
    down: str
    us: float | None
    default_us: float | None
    best_us: float


def suggested(cells: Sequence[CellData]) -> list[Suggested]:
    """``moeopt suggest`` on one recording."""
    shape, gpu = cells[0].shape, cells[0].gpu
    sizes = sorted({cell.batch_size for cell in cells})
    us = {(cell.role, cell.batch_size): dict(zip(cell.configs, cell.us.tolist(), strict=True)) for cell in cells}
    rows = []
    for m, s in suggest(shape, gpu, sizes).items():
        up, down = us["up", m], us["down", m]
        default = engines.get("sglang").default_config(shape, m, gpu)
        best: dict[tuple[str, int], float] = {}
        for role, times in (("up", up), ("down", down)):
            for config, value in times.items():
                key = (role, config.block_size_m)
                best[key] = min(best.get(key, np.inf), value)
        rows.append(
            Suggested(
                cells[0].recording, m, str(s.up), str(s.down),
                up[s.up] + down[s.down] if s.up in up and s.down in down else None,
                up[default] + down[default] if default in up and default in down else None,
                min(value + best["down", rows_m] for (role, rows_m), value in best.items() if role == "up"),
            )
        )  # fmt: skip
    return rows


def predict(cell: CellData) -> Array:
    """Predicted times of a cell, by a fit that has not seen its layer."""
    return predict_us(cell.shape, cell.gpu, cell.role, cell.batch_size, cell.configs)


def summary(rows: Sequence[tuple[CellData, Score]]) -> dict[str, float]:
    """Means over cells."""
    scores = np.array([score for _, score in rows])
    names = ("rho", "best_at", "regret_of_1", "regret_of_8", "regret_of_24")
    means = {name: round(float(value), 4) for name, value in zip(names, scores.mean(axis=0), strict=True)}
    return {"cells": len(rows), **means, "best_in_first_5_percent": round(float(np.mean(scores[:, 1] <= 0.05)), 4)}


def table(rows: Sequence[tuple[CellData, Score]]) -> str:
    """The table and its summary line."""
    lines = [f"{'recording':42} {'cell':>11} {'rho':>6} {'best at':>8} {'1st':>7} {'of 8':>7} {'of 24':>7}"]
    for cell, (rho, place, *regrets) in rows:
        name = f"{cell.role} M={cell.batch_size}"
        lines.append(
            f"{cell.recording:42} {name:>11} {rho:6.3f} {place:8.1%}" + "".join(f" {r:+7.1%}" for r in regrets)
        )
    means = summary(rows)
    lines.append(
        f"{len(rows)} cells: mean rho {means['rho']:.3f}, the best within the first 5 % in "
        f"{means['best_in_first_5_percent']:.0%}, regret of the first {means['regret_of_1']:.1%}, "
        f"of 8 {means['regret_of_8']:.1%}, of 24 {means['regret_of_24']:.1%}"
    )
    return "\n".join(lines)


def suggestion_summary(rows: Sequence[Suggested]) -> dict[str, float]:
    """Regret against the best, and speed over the default (geometric mean), where both ran."""
    ran = [row for row in rows if row.us is not None]
    regrets = [row.us / row.best_us - 1 for row in ran if row.us is not None]
    gains = [row.default_us / row.us for row in ran if row.us is not None and row.default_us is not None]
    slower = sum(gain < 1 for gain in gains)
    return {
        "cells": len(rows),
        "did_not_run": len(rows) - len(ran),
        "mean_regret": round(float(np.mean(regrets)), 4),
        "median_regret": round(float(np.median(regrets)), 4),
        "worst_regret": round(max(regrets), 4),
        "speed_over_default": round(float(np.exp(np.mean(np.log(gains)))), 3),
        "slower_than_default": slower,
    }


def write_json(path: Path, what: str, rows: Sequence[tuple[CellData, Score]], suggestions: Sequence[Suggested]) -> None:
    """The table as JSON."""
    by_recording: dict[str, list[tuple[CellData, Score]]] = {}
    for row in rows:
        by_recording.setdefault(row[0].recording, []).append(row)
    content = {
        "what": what,
        "command": "python -m benchmarks.costmodel "
        + " ".join(a if a.startswith("--") else Path(a).name for a in sys.argv[1:]),
        "commit": commit(),
        "all": summary(rows),
        "suggest": suggestion_summary(suggestions),
        "recordings": {
            name: {
                **summary(mine),
                "per_cell": {
                    f"{cell.role} {cell.batch_size}": [round(value, 4) for value in score] for cell, score in mine
                },
                "suggest": suggestion_summary([s for s in suggestions if s.recording == name]),
                "suggestions": [
                    {k: round(v, 1) if isinstance(v, float) else v for k, v in vars(s).items() if k != "recording"}
                    for s in suggestions
                    if s.recording == name
                ],
            }
            for name, mine in by_recording.items()
        },
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def commit() -> str:
    """Of the tree that runs; MOEOPT_COMMIT where there is no git."""
    given = os.environ.get("MOEOPT_COMMIT")
    if given:
        return given
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--json", type=Path, help="write the table here, too")
    parser.add_argument("--fit", action="store_true", help="fit on all shipped recordings and write the file")
    options = parser.parse_args()
    if options.fit == bool(options.recordings):
        parser.error("give recordings to judge by, or --fit")
    if options.fit:
        write_fits(load_landscapes(), Path(__file__).resolve().parents[1] / "moeopt" / "costmodel" / FITTED)
        return
    rows, suggestions = [], []
    for path in options.recordings:
        cells = cells_of(path)
        rows += [(cell, judge(cell, predict(cell))) for cell in cells]
        suggestions += suggested(cells)
    print(table(rows))
    for s in suggestions:
        us, default = s.us or float("nan"), s.default_us or float("nan")
        print(
            f"{s.recording:42} M={s.batch_size:<5} {us / s.best_us - 1:+7.1%}, {default / us:5.2f}x the default: "
            f"{s.up}, {s.down}"
        )
    print(f"suggestions: {suggestion_summary(suggestions)}")
    if options.json is not None:
        write_json(options.json, "each judged by the fit without its layer", rows, suggestions)


if __name__ == "__main__":
    main()
