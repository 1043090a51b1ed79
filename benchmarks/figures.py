"""The pictures of README and docs, light and dark, from benchmarks/results.

python -m benchmarks.figures [--out docs/assets]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from moeopt.files import write_file
from moeopt.report.chart import DARK, LIGHT, Chart, Series, standalone

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
METHODS = {
    "moeopt": "ours",
    "coordinate descent": "coordinate descent",
    "Optuna TPE": "Optuna TPE",
    "random": "random",
    "grid, one config": "exhaustive grid, joint",
}


def main() -> None:
    """Writes every picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets")
    out = parser.parse_args().out
    for name, charts in pictures().items():
        for theme, colours in (("light", LIGHT), ("dark", DARK)):
            path = out / f"{name}-{theme}.svg"
            write_file(path, standalone(charts, colours))
            print("wrote", path)


def pictures() -> dict[str, list[Chart]]:
    """The charts of each picture."""
    qwen = _read("whole_tune-qwen3.5-builtin")["cold"]["batch_sizes"]
    glm = _read("whole_tune-glm5-builtin")["cold"]["batch_sizes"]
    replays = _read("search-regret")
    return {
        "summary": [speedup(qwen, glm), regret(replays)],
        "latency": [latency(qwen)],
        "regret": [curves(replays)],
    }


def speedup(qwen: dict[str, Any], glm: dict[str, Any]) -> Chart:
    """Default over tuned time of both projections, by batch size."""
    sizes = sorted(map(int, qwen))
    series = [
        Series(name, [(i, rows[str(m)]["default_us"] / rows[str(m)]["total_us"]) for i, m in enumerate(sizes)], "bars")
        for name, rows in (("Qwen3.5-122B TP4, bf16", qwen), ("GLM-5 TP8, fp8", glm))
    ]
    ticks = [(i, str(m)) for i, m in enumerate(sizes)]
    title = "Speed-up over the default config, H200"
    return Chart(title, "batch size (tokens)", "default / tuned time", series, x_ticks=ticks, width=660, height=330)


def curves(replays: list[dict[str, Any]]) -> Chart:
    """Mean regret against configs timed, over the recordings on which all of these were replayed."""
    methods = {"moeopt": "ours", "without recordings": "ours alone", "coordinate descent": "coordinate descent"}
    methods["Optuna TPE"] = "Optuna TPE"
    rows = [{row["method"]: row.get("curve", {}) for row in result["rows"]} for result in replays]
    rows = [row for row in rows if all(name in row for name in methods.values())]
    series = []
    for name, method in methods.items():
        points = []
        for n in sorted(map(int, rows[0][method])):
            found = [row[method][str(n)] for row in rows]
            if None not in found:  # somewhere a batch size had no split yet
                points.append((float(n), statistics.mean(found)))
        series.append(Series(name, points, tips=[f"{n:g} timed: {value:.2f} %" for n, value in points]))
    title = f"Slower than the best, mean over {len(rows)} H200 recordings"
    return Chart(title, "configs timed per batch size and projection", "regret, %", series, y_log=True)


def regret(replays: list[dict[str, Any]]) -> Chart:
    """Regret of every method on every recording after 24 timed configs."""
    series = []
    for place, (name, method) in enumerate(METHODS.items()):
        points, tips = [], []
        rows = [(r["recording"], row) for r in replays for row in r["rows"] if row["method"] == method]
        rows = [(recording, row) for recording, row in rows if row["mean"] is not None]
        for number, (recording, row) in enumerate(rows):
            # Side by side, so that each is seen.
            points.append((place + 0.6 * (number / max(len(rows) - 1, 1) - 0.5), max(row["mean"], 0.01)))
            tips.append(f"{recording.removesuffix('.jsonl.gz')}: {row['mean']:.2f} %")
        series.append(Series(name, points, "dots", tips=tips))
    ticks = [(place, name) for place, name in enumerate(METHODS)]
    title = "Slower than the best after 24 timed configs, each H200 recording"
    return Chart(title, "", "%", series, y_log=True, x_ticks=ticks, width=660, height=330)


def latency(rows: dict[str, Any]) -> Chart:
    """Microseconds of both projections: default, tuned, roofline."""
    sizes = sorted(map(int, rows))
    series = [
        Series(name, [(m, rows[str(m)][key]) for m in sizes], dashed=dashed, colour=colour)
        for name, key, dashed, colour in (
            ("default", "default_us", False, 1),
            ("tuned", "total_us", False, 0),
            ("roofline", "roofline_us", True, 4),
        )
    ]
    return Chart(
        "Qwen3.5-122B-A10B TP4, bf16, on an H200: both projections",
        "batch size (tokens)",
        "µs",
        series,
        x_log=True,
        y_log=True,
        x_ticks=[(m, str(m)) for m in sizes],
    )


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
