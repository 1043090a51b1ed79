"""Judges the cost model on recordings, and fits it.

    python benchmarks/costmodel.py RECORDING...          how well the shipped coefficients rank
    python benchmarks/costmodel.py --cross RECORDING...  fitted on the others, judged on each in turn
    python benchmarks/costmodel.py --fit RECORDING...    prints coefficients for moeopt/costmodel_fitted.py

All take --json FILE. A fold of --cross takes about 15 s of one core.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moeopt.costmodel import SHIPPED, Coefficients, config_fields, correction_features, launch_parts, predict_us
from moeopt.costmodel_fitted import FORMULA
from moeopt.gpu import GpuSpec
from moeopt.kernels.defaults import engine_default
from moeopt.measure.recording import Recording
from moeopt.shape import ROLES, MoEShape, Role
from moeopt.space import LaunchConfig
from moeopt.suggest import suggest

Array = NDArray[np.float64]

RIDGE = 0.03
# The formula is fitted on so many configs of a cell, the fastest and an even share of the rest, and on
# every second cell; the correction on everything.
FASTEST, OTHERS = 32, 64
Score = tuple[float, float, float, float, float]
# Where the fit starts, and how far (in e-folds) a coefficient may move from there.
START: Mapping[str, tuple[float, float]] = {
    "wgmma": (0.8, 0.25), "mma": (0.7, 0.35), "mma_fp8": (0.5, 0.7), "swapped": (0.6, 0.7),
    "l2_per_unit": (100.0, 0.8), "l2": (6000.0, 0.7), "shared": (150.0, 0.6), "latency": (0.8, 0.7),
    "sync": (0.05, 2), "warps": (0.3, 2), "issue": (0.3, 2), "alone": (1.0, 2), "prologue": (1.5, 1),
    "epilogue": (0.3, 2), "fill": (0.3, 2), "idle": (0.01, 2), "launch": (2.0, 1), "dram": (0.85, 0.2),
    "short_loads": (0.3, 2), "short_dram": (0.1, 2), "block_scale": (0.5, 2), "dequantise": (0.5, 2.5),
    "dequantise_wgmma": (1.0, 1.5), "dequantise_groups": (1.5, 1), "spill": (5.0, 1.5),
    "whole_waves": (0.6, 0.5), "overlap": (3.0, 0.7), "bound": (3.0, 0.7),
}  # fmt: skip


@dataclass(frozen=True)
class CellData:
    """The measured times of one cell."""

    recording: str
    shape: MoEShape
    gpu: GpuSpec
    role: Role
    batch_size: int
    configs: tuple[LaunchConfig, ...]
    fields: Array
    us: Array

    @property
    def weights(self) -> Array:
        """How much each config counts in a fit: the fast ones most."""
        return self.us.min() / self.us

    def thinned(self) -> CellData:
        """The fastest configs and an even share of the others."""
        order = np.argsort(self.us, kind="stable")
        rest = order[FASTEST:]
        kept = np.concatenate([order[:FASTEST], rest[np.linspace(0, len(rest) - 1, OTHERS).astype(int)]])
        return replace(self, configs=tuple(self.configs[i] for i in kept), fields=self.fields[kept], us=self.us[kept])


def cells_of(path: Path) -> list[CellData]:
    """All cells of a recording."""
    recording = Recording.load(path)
    rows = [row for row in recording.rows.values() if row.status == "ok"]
    configs = tuple(row.config for row in rows)
    fields = config_fields(configs)
    return [
        CellData(
            path.name.split(".")[0], recording.shape, recording.gpu, role, m, configs, fields,
            np.array([statistics.median(row.roles[role].us[m]) for row in rows]),
        )
        for role in ROLES
        for m in recording.batch_sizes
    ]  # fmt: skip


def fit_formula(cells: Sequence[CellData]) -> dict[str, float]:
    """Coefficients of the formula: weighted least squares of log time, robust, each cell's level nearly free."""
    names = list(START)
    start = np.log([START[name][0] for name in names])
    reach = np.array([START[name][1] for name in names])
    some = [cell.thinned() for cell in cells[::2]]

    def residuals(point: Array) -> Array:
        coefficients = dict(zip(names, np.exp(point), strict=True))
        out = []
        for cell in some:
            us = launch_parts(cell.shape, cell.gpu, cell.role, cell.batch_size, cell.fields, coefficients).us
            error = np.log(us / cell.us)
            level = np.average(error, weights=cell.weights)
            out += [(error - level) * cell.weights, [5 * level]]
        return np.concatenate(out)

    found = least_squares(
        residuals, start, bounds=(start - reach, start + reach), loss="soft_l1", f_scale=0.3, max_nfev=25
    )
    return {name: float(f"{value:.4g}") for name, value in zip(names, np.exp(found.x), strict=True)}


def fit_correction(cells: Sequence[CellData], formula: Mapping[str, float]) -> Array:
    """Coefficients of the correction: ridge regression of what the formula leaves, within each cell."""
    left, right = [], []
    for cell in cells:
        parts = launch_parts(cell.shape, cell.gpu, cell.role, cell.batch_size, cell.fields, formula)
        features, rest, weights = correction_features(parts), np.log(cell.us / parts.us), cell.weights
        left.append((features - np.average(features, axis=0, weights=weights)) * weights[:, None])
        right.append((rest - np.average(rest, weights=weights)) * weights)
    x, y = np.concatenate(left), np.concatenate(right)
    scale = x.std(axis=0) + 1e-9
    x = x / scale
    return np.asarray(np.linalg.solve(x.T @ x + RIDGE * len(y) * np.eye(x.shape[1]), x.T @ y) / scale)


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


def suggested(cells: Sequence[CellData], coefficients: Coefficients) -> list[Suggested]:
    """``moeopt suggest`` on one recording, by a model that may not have seen it."""
    shape, gpu = cells[0].shape, cells[0].gpu
    sizes = sorted({cell.batch_size for cell in cells})
    us = {(cell.role, cell.batch_size): dict(zip(cell.configs, cell.us.tolist(), strict=True)) for cell in cells}
    rows = []
    for m, s in suggest(shape, gpu, sizes, coefficients=coefficients).items():
        up, down = us["up", m], us["down", m]
        default = engine_default("sglang", shape, m, gpu)
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


def left_out(cells: Sequence[CellData]) -> tuple[list[tuple[CellData, Score]], list[Suggested]]:
    """Each recording's cells, judged by a model that was fitted on all other recordings; and its suggestions."""
    rows, suggestions = [], []
    for name in dict.fromkeys(cell.recording for cell in cells):
        fitted = fit([cell for cell in cells if layer(cell.recording) != layer(name)])
        mine = [cell for cell in cells if cell.recording == name]
        rows += [(cell, judge(cell, predict(cell, fitted))) for cell in mine]
        suggestions += suggested(mine, fitted)
        print(f"{name} judged", file=sys.stderr, flush=True)
    return rows, suggestions


def layer(recording: str) -> str:
    """The layer of a recording's name: what two kernels measured of one layer is not new to either."""
    return recording.removesuffix("-sglang")


def predict(cell: CellData, coefficients: Coefficients = SHIPPED) -> Array:
    """Predicted times of a cell."""
    return predict_us(cell.shape, cell.gpu, cell.role, cell.batch_size, cell.configs, coefficients)


def fit(cells: Sequence[CellData]) -> Coefficients:
    """Formula and correction."""
    formula = fit_formula(cells)
    return Coefficients(formula, fit_correction(cells, formula).tolist())


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
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="write the table here, too")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--cross", action="store_true", help="fit on all recordings but the one judged")
    group.add_argument("--fit", action="store_true", help="fit on all and print the coefficients")
    options = parser.parse_args()
    cells = [cell for path in options.recordings for cell in cells_of(path)]
    if options.fit:
        fitted = fit(cells)
        print(f"FORMULA = {dict(fitted.formula)!r}\nCORRECTION = {[float(f'{c:.3g}') for c in fitted.correction]!r}")
        return
    if options.cross:
        what = "fitted on the other recordings, judged on each in turn"
        rows, suggestions = left_out(cells)
    else:
        what = "the shipped coefficients"
        rows = [(cell, judge(cell, predict(cell))) for cell in cells]
        by_recording: dict[str, list[CellData]] = {}
        for cell in cells:
            by_recording.setdefault(cell.recording, []).append(cell)
        suggestions = [s for mine in by_recording.values() for s in suggested(mine, SHIPPED)]
    print(table(rows))
    print(f"{len(FORMULA)} coefficients of the formula, ridge {RIDGE}")
    for s in suggestions:
        us, default = s.us or float("nan"), s.default_us or float("nan")
        print(
            f"{s.recording:42} M={s.batch_size:<5} {us / s.best_us - 1:+7.1%}, {default / us:5.2f}x the default: "
            f"{s.up}, {s.down}"
        )
    print(f"suggestions: {suggestion_summary(suggestions)}")
    if options.json is not None:
        write_json(options.json, what, rows, suggestions)


if __name__ == "__main__":
    main()
