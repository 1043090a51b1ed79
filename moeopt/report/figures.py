"""Charts of a result and of the trials behind it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from moeopt.core.shape import ROLES
from moeopt.core.trial import Cell, Measurement
from moeopt.report.chart import Chart, Series
from moeopt.storage.store import StoredTrial
from moeopt.tuning.outcome import Outcome

Trials = Mapping[Cell, Sequence[StoredTrial]]
_LEAST: Final = 0.1  # percent: less is drawn as this, on a logarithmic axis


def latency_chart(result: Outcome) -> Chart:
    """Microseconds of both projections against batch size: default, tuned, roofline."""
    ticks = [(float(m), str(m)) for m in result.batch_sizes]
    series = _times(result, "line", relative=False)
    return Chart("Time of both projections", "batch size M (tokens)", "µs", series, True, True, ticks)


def relative_chart(result: Outcome) -> Chart:
    """The same over the tuned time, batch size by batch size."""
    ticks = [(float(place), str(m)) for place, m in enumerate(result.batch_sizes)]
    series = _times(result, "bars", relative=True)
    return Chart("Default and roofline over tuned", "batch size M (tokens)", "time / tuned", series, x_ticks=ticks)


def _times(result: Outcome, kind: Literal["line", "bars"], *, relative: bool) -> list[Series]:
    out = []
    rows = [result.rows[m] for m in result.batch_sizes]
    for name, colour, values in (
        ("default", 1, [row.default_us for row in rows]),
        ("tuned", 0, [row.total_us for row in rows]),
        ("roofline", 4, [row.roofline_us for row in rows]),
    ):
        points, tips = [], []
        for place, (row, us) in enumerate(zip(rows, values, strict=True)):
            if us is not None:
                points.append((place, us / row.total_us) if relative else (row.batch_size, us))
                tips.append(f"M={row.batch_size}, {name}: {us:.1f} µs")
        if points:
            out.append(Series(name, points, kind, dashed=name == "roofline", tips=tips, colour=colour))
    return out


def landscape_chart(result: Outcome, trials: Trials) -> Chart | None:
    """Up against down for what was timed with both, by BLOCK_SIZE_M; None where they were not tuned apart."""
    clouds: dict[int, tuple[list[tuple[float, float]], list[str]]] = {}
    for m, row in sorted(result.rows.items()):
        times = {
            role: {one.job.config: one.median_us for one in _timed(trials.get(Cell(role, m), ()))} for role in ROLES
        }
        for config in sorted(set(times["up"]) & set(times["down"])):
            up, down = times["up"][config], times["down"][config]
            points, tips = clouds.setdefault(config.block_size_m, ([], []))
            points.append((up / row.up.us, down / row.down.us))
            tips.append(f"M={m}, {config}: up {up:.1f} µs, down {down:.1f} µs")
    if not clouds:
        return None
    series = [Series(f"BLOCK_SIZE_M {n}", points, "dots", tips=tips) for n, (points, tips) in sorted(clouds.items())]
    title = "Landscape: configs timed for both, over the chosen pair"
    return Chart(title, "up / chosen up", "down / chosen down", series, x_log=True, y_log=True)


def regret_chart(trials: Trials) -> Chart | None:
    """How far the best so far is from the final best, against configs timed; None where nothing was timed."""
    roles: dict[str, list[list[float]]] = {}
    for cell, found in trials.items():
        curve = _best_so_far(found)
        if curve:
            roles.setdefault(cell.role, []).append([100 * (us / curve[-1] - 1) for us in curve])
    longest = max((len(curve) for curves in roles.values() for curve in curves), default=0)
    if longest < 2:
        return None
    series = []
    for role, curves in sorted(roles.items(), reverse=True):
        means = [statistics.mean(curve[min(n, len(curve) - 1)] for curve in curves) for n in range(longest)]
        tips = [f"{n} timed: {value:.2f} %" for n, value in enumerate(means, 1)]
        points = [(float(n), max(value, _LEAST)) for n, value in enumerate(means, 1)]
        series.append(Series(role, points, tips=tips))
    title = "The best so far over the final best, mean over batch sizes"
    return Chart(title, "configs timed per batch size", f"slower, % (least {_LEAST:g})", series, y_log=True)


def _best_so_far(trials: Sequence[StoredTrial]) -> list[float]:
    """After each timed config, from the first that was timed in full."""
    out: list[float] = []
    for measurement in _timed(trials):
        us = measurement.median_us if measurement.status == "ok" else float("inf")
        if out or us != float("inf"):
            out.append(min([us, *out[-1:]]))
    return out


def _timed(trials: Sequence[StoredTrial]) -> list[Measurement]:
    return [trial.measurement for trial in trials if trial.measurement.us]
