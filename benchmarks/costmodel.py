"""Judges the cost model on recordings, and fits it.

    python benchmarks/costmodel.py RECORDING...          how well the shipped coefficients rank
    python benchmarks/costmodel.py --cross RECORDING...  fitted on the others, judged on each in turn
    python benchmarks/costmodel.py --fit RECORDING...    prints coefficients for moeopt/costmodel_fitted.py

Per cell (role, M): Spearman's rank correlation of predicted and measured times over all configs, the
place of the true best in the predicted order (share of configs predicted faster), and how much slower
than the best is the best among the first 1, 8 and 24 predicted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from moeopt.costmodel import config_fields, correction_features, launch_parts, predict_us
from moeopt.costmodel_fitted import FORMULA
from moeopt.gpu import GpuSpec
from moeopt.measure.recording import Recording
from moeopt.shape import ROLES, MoEShape, Role
from moeopt.space import LaunchConfig

Array = NDArray[np.float64]

RIDGE = 0.03
# Where the fit starts, and how far (in e-folds) a coefficient may move from there.
START: Mapping[str, tuple[float, float]] = {
    "wgmma": (0.8, 0.25), "mma": (0.7, 0.35), "mma_fp8": (0.5, 0.7), "swapped": (0.6, 0.7),
    "l2_per_unit": (100.0, 0.8), "l2": (6000.0, 0.7), "shared": (150.0, 0.6), "latency": (0.8, 0.7),
    "sync": (0.05, 2), "warps": (0.3, 2), "issue": (0.3, 2), "alone": (1.0, 2), "prologue": (1.5, 1),
    "epilogue": (0.3, 2), "fill": (0.3, 2), "idle": (0.01, 2), "launch": (2.0, 1), "dram": (0.85, 0.2),
    "short_loads": (0.3, 2), "short_dram": (0.1, 2), "block_scale": (0.5, 2), "spill": (5.0, 1.5),
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

    def residuals(point: Array) -> Array:
        coefficients = dict(zip(names, np.exp(point), strict=True))
        out = []
        for cell in cells:
            us = launch_parts(cell.shape, cell.gpu, cell.role, cell.batch_size, cell.fields, coefficients).us
            error = np.log(us / cell.us)
            level = np.average(error, weights=cell.weights)
            out += [(error - level) * cell.weights, [5 * level]]
        return np.concatenate(out)

    found = least_squares(
        residuals, start, bounds=(start - reach, start + reach), loss="soft_l1", f_scale=0.3, max_nfev=60
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


def judge(cell: CellData, predicted: Array) -> tuple[float, float, float, float, float]:
    """Spearman's correlation, place of the best, and regret after the first 1, 8 and 24."""
    best = int(np.argmin(cell.us))
    order = np.argsort(predicted, kind="stable")
    regrets = [float(cell.us[order[:n]].min() / cell.us[best] - 1) for n in (1, 8, 24)]
    place = float(np.mean(predicted < predicted[best]))
    return float(spearmanr(predicted, cell.us).statistic), place, regrets[0], regrets[1], regrets[2]


def table(rows: Sequence[tuple[CellData, tuple[float, float, float, float, float]]]) -> str:
    """The table and its summary line."""
    lines = [f"{'recording':42} {'cell':>11} {'rho':>6} {'best at':>8} {'1st':>7} {'of 8':>7} {'of 24':>7}"]
    for cell, (rho, place, *regrets) in rows:
        name = f"{cell.role} M={cell.batch_size}"
        lines.append(
            f"{cell.recording:42} {name:>11} {rho:6.3f} {place:8.1%}" + "".join(f" {r:+7.1%}" for r in regrets)
        )
    scores = np.array([score for _, score in rows])
    within = float(np.mean(scores[:, 1] <= 0.05))
    lines.append(
        f"{len(rows)} cells: mean rho {scores[:, 0].mean():.3f}, the best within the first 5 % in {within:.0%}, "
        + "regret of the first {:.1%}, of 8 {:.1%}, of 24 {:.1%}".format(*scores[:, 2:].mean(axis=0))
    )
    return "\n".join(lines)


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--cross", action="store_true", help="fit on all recordings but the one judged")
    group.add_argument("--fit", action="store_true", help="fit on all and print the coefficients")
    options = parser.parse_args()
    cells = [cell for path in options.recordings for cell in cells_of(path)]
    if options.fit:
        formula = fit_formula(cells)
        correction = fit_correction(cells, formula)
        print(f"FORMULA = {formula!r}\nCORRECTION = {[float(f'{c:.3g}') for c in correction]!r}")
        return
    rows = []
    if options.cross:
        for name in dict.fromkeys(cell.recording for cell in cells):
            others = [cell for cell in cells if cell.recording != name]
            formula = fit_formula(others)
            correction = fit_correction(others, formula)
            for cell in cells:
                if cell.recording == name:
                    parts = launch_parts(cell.shape, cell.gpu, cell.role, cell.batch_size, cell.fields, formula)
                    rows.append((cell, judge(cell, np.log(parts.us) + correction_features(parts) @ correction)))
    else:
        for cell in cells:
            predicted = predict_us(cell.shape, cell.gpu, cell.role, cell.batch_size, cell.configs)
            rows.append((cell, judge(cell, predicted)))
    print(table(rows))
    print(f"{len(FORMULA)} coefficients of the formula, ridge {RIDGE}")


if __name__ == "__main__":
    main()
