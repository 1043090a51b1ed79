"""Table and plot of what benchmarks.search measured.

    python -m benchmarks.search_report ours.json arms.json ...

Takes any number of files that ``benchmarks.search --json`` wrote, joins the methods of each recording (of a
method that is in two files the first counts), and writes search-regret.json, search-regret.html and search.md
into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.search import as_json

RESULTS = Path(__file__).parent / "results"
ORDER = (
    "ours",
    "ours, 12",
    "ours alone",
    "coordinate descent",
    "random",
    "Optuna TPE",
    "Optuna GPSampler",
    "exhaustive grid, joint",
)


def join(files: Sequence[Path]) -> list[dict[str, Any]]:
    """One result per recording, with the rows and bars of all files."""
    out: dict[str, dict[str, Any]] = {}
    for path in files:
        for result in json.loads(path.read_text()):
            into = out.setdefault(result["recording"], {**result, "rows": [], "bars": []})
            there = {row["method"] for row in into["rows"]}
            into["rows"] += [row for row in result["rows"] if row["method"] not in there]
            into["bars"] += result["bars"]
    for result in out.values():
        result["rows"].sort(key=lambda row: ORDER.index(row["method"]))
    return [out[name] for name in sorted(out)]


def markdown(results: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    """The bars and the methods, per recording."""
    lines = [
        "# The search, replayed on recordings",
        "",
        *(line for note in notes for line in (note, "")),
        "## Bars",
        "",
    ]
    columns = (
        ("24: mean <= 0.3", "24 timed: mean", ".2f"),
        ("24: worst <= 1", "24 timed: worst", ".2f"),
        ("12: mean <= 1", "12 timed", ".2f"),
        ("alone: mean <= 1.5", "24 timed, no recordings", ".2f"),
        ("slower than joint <= 0.5", "slower than", ".2f"),
        ("compiled <= 150", "distinct configs", ".0f"),
        ("timed <= 24", "most configs", ".0f"),
    )
    heads = ["recording", *(head for head, _, _ in columns), "faster than joint, of what is possible"]
    lines += [_line(heads), _line(["---"] * len(heads))]
    for result in results:
        cells = [_short(result["recording"])]
        for _, start, form in columns:
            bar = next((b for b in result["bars"] if b["what"].startswith(start)), None)
            cells.append("" if bar is None else _marked(format(bar["figure"], form), bar["holds"]))
        ours = next((row for row in result["rows"] if row["method"] == "ours"), None)
        grid = next((row for row in result["rows"] if row["method"] == "exhaustive grid, joint"), None)
        cells.append("")
        if ours is not None and grid is not None:
            logs = [math.log1p(v / 100) for v in grid["per_batch_size"].values()]
            most = 100 * math.expm1(sum(logs) / len(logs))
            cells[-1] = f"{100 * (ours['geomean_vs_joint'] - 1):.2f} of {most:.2f} %"
        lines.append(_line(cells))
    lines += [
        "",
        "In bold: misses the bar. Regret in percent of the best split of the recording.",
        "",
        "## Methods",
        "",
    ]
    names = [name for name in ORDER if any(row["method"] == name for r in results for row in r["rows"])]
    lines += [_line(["mean / worst batch size, %", *names]), _line(["---"] * (len(names) + 1))]
    for result in results:
        by = {row["method"]: row for row in result["rows"]}
        lines.append(_line([_short(result["recording"]), *(_regret(by.get(name)) for name in names)]))
    seeds = {name: sorted({r["seeds"] for x in results for r in x["rows"] if r["method"] == name}) for name in names}
    lines += ["", "Seeds: " + "; ".join(f"{n} {'-'.join(map(str, s))}" for n, s in seeds.items()) + "."]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _short(name: str) -> str:
    return name.removesuffix(".jsonl.gz").removeprefix("h200-")


def _marked(text: str, holds: bool) -> str:
    return text if holds else f"**{text}**"


def _regret(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return " / ".join("none" if row[key] is None else f"{row[key]:.2f}" for key in ("mean", "worst"))


def plot(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Regret against timed configs, one panel per recording."""
    from plotly.subplots import make_subplots

    wide = 4
    titles = [_short(r["recording"]) for r in results]
    figure = make_subplots(rows=-(-len(results) // wide), cols=wide, subplot_titles=titles)
    colours = ["#d62728", "#ff9896", "#1f77b4", "#7f7f7f", "#2ca02c", "#9467bd"]
    colour_of = dict(zip([name for name in ORDER if name != "ours, 12"], colours, strict=False))
    shown: set[str] = set()
    for number, result in enumerate(results):
        for row in result["rows"]:
            if not row["curve"] or row["method"] not in colour_of:
                continue
            figure.add_scatter(
                x=[int(point) for point in row["curve"]],
                y=[None if v is None else max(v, 0.01) for v in row["curve"].values()],
                name=row["method"],
                mode="lines+markers",
                line={"color": colour_of[row["method"]]},
                legendgroup=row["method"],
                showlegend=row["method"] not in shown,
                row=number // wide + 1,
                col=number % wide + 1,
            )
            shown.add(row["method"])
    figure.update_yaxes(type="log", title_text="mean regret of the split, %", col=1)
    figure.update_yaxes(type="log")
    figure.update_xaxes(title_text="configs timed per (batch size, role)", row=-(-len(results) // wide))
    figure.update_layout(width=1500, height=380 * -(-len(results) // wide), template="plotly_white")
    figure.write_html(out, include_plotlyjs="cdn")


def main(arguments: Sequence[str]) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Table and plot of what benchmarks.search measured.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what benchmarks.search --json wrote")
    parser.add_argument("--note", action="append", default=[], help="a sentence for the head of the table")
    given = parser.parse_args(arguments)
    results = join(given.files)
    (RESULTS / "search-regret.json").write_text(as_json(results))
    (RESULTS / "search.md").write_text(markdown(results, given.note))
    plot(results, RESULTS / "search-regret.html")


if __name__ == "__main__":
    main(sys.argv[1:])
