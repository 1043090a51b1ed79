"""A result as one HTML page that needs nothing else: tables and charts, for light and dark."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moeopt.core.trial import Measurement
from moeopt.errors import StorageError
from moeopt.files import write_file
from moeopt.report.chart import DARK, LIGHT, chart_css, style
from moeopt.report.figures import Trials, landscape_chart, latency_chart, regret_chart, relative_chart
from moeopt.storage.facts import Run
from moeopt.storage.store import StudyStore
from moeopt.tuning.outcome import Outcome

log = logging.getLogger(__name__)

_COLUMNS: Final = (
    "M", "default µs", "up µs", "down µs", "both µs", "speed-up", "roofline", "timed", "up config", "down config",
)  # fmt: skip
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>
:root { {{ light }} --paper: #ffffff; --stripe: #f3f5f7; --note: #fff8e6 }
@media (prefers-color-scheme: dark) { :root { {{ dark }} --paper: #0d1117; --stripe: #161b22; --note: #272115 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper) }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.wide { overflow-x: auto } .figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%,
  34rem), 1fr)) } .figures > div { overflow-x: auto } .figures svg { width: 100%; min-width: 30rem; height: auto }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .7rem; text-align: right; white-space: nowrap } .l { text-align: left }
.l.text, .name { white-space: normal; overflow-wrap: anywhere } .l.text { min-width: 12rem }
th { border-bottom: 2px solid var(--faint) } tr:nth-child(even) td { background: var(--stripe) }
.note { border-left: 4px solid #bf8700; padding: .2rem .8rem; background: var(--note) } {{ css }}
</style></head><body><h1>{{ title }}</h1>
<p>{{ summary }}</p>
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
<div class="wide"><table><tr>{% for name in columns %}<th{% if "config" in name %} class="l"{% endif %}>{{ name }}</th>
{%- endfor %}</tr>
{% for row in rows %}<tr>
{%- for name in columns %}<td{% if "config" in name %} class="l"{% endif %}>{{ row[name] }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<div class="figures">{% for chart in charts %}<div>{{ chart | safe }}</div>
{% endfor %}</div>
{% if pruned %}<h2>Pruned, and why</h2><div class="wide"><table>
<tr><th class="l">how</th><th>trials</th><th class="l">most often</th></tr>
{% for how, count, example in pruned %}<tr><td class="l">{{ how }}</td><td>{{ count }}</td>
<td class="l text">{{ example }}</td></tr>
{% endfor %}</table></div>{% endif %}
<h2>{{ runs_title }}</h2><div class="wide"><table>
{% for name, value in facts.items() %}<tr><th class="l name">{{ name }}</th><td class="l text">{{ value }}</td></tr>
{% endfor %}</table></div></body></html>
"""


def write_report(result: Outcome, path: Path) -> Path:
    """Writes the page: of all runs of the study where the result has a database, else of the result alone.

    Raises:
        ExportError: The file cannot be written.
    """
    trials, runs = _study(result)
    charts = [latency_chart(result), relative_chart(result)] if result.rows else []
    charts += [chart for chart in (landscape_chart(result, trials), regret_chart(trials)) if chart is not None]
    write_file(path, _page(result, trials, runs, [chart.svg() for chart in charts]))
    return path


def _study(result: Outcome) -> tuple[Trials, Sequence[Run]]:
    if not result.storage or result.key is None:  # a caller's own backend has no URL
        return {}, ()
    try:
        with StudyStore(result.storage, create=False) as store:
            return store.load(result.key, store.cells(result.key)), tuple(store.runs(result.key))
    except StorageError as error:  # went away during the run, whose result is still worth a page
        log.warning("the report is of this run alone: %s", error)
        return {}, ()


def _page(result: Outcome, trials: Trials, runs: Sequence[Run], charts: list[str]) -> str:
    from jinja2 import Template

    page: str = Template(_PAGE, autoescape=True, keep_trailing_newline=True).render(
        title=f"{result.shape.slug()} on {result.gpu}",
        summary=_summary(result),
        notes=result.notes,
        columns=_COLUMNS,
        rows=[row.texts() for _, row in sorted(result.rows.items())],
        charts=charts,
        pruned=_pruned(trial.measurement for found in trials.values() for trial in found),
        runs_title="All runs of the study" if trials else "The run",
        facts={**_made(result), **(_counts(trials, runs) if trials else _this_run(result))},
        light=style(LIGHT),
        dark=style(DARK),
        css=chart_css(),
    )
    return page


def _summary(result: Outcome) -> str:
    gain = result.geomean_speedup()
    sizes = f"{len(result.rows)} batch sizes, {result.mode} mode"
    return sizes if gain is None else f"{gain:.2f}x the engine's default, geometric mean; {sizes}"


def _made(result: Outcome) -> dict[str, Any]:
    """What the times come from."""
    info = result.info
    return {
        "times from": f"a recording of {result.gpu}, replayed" if info.recorded else result.gpu,
        "kernel": f"{info.kernel_title} {info.kernel_hash}",
        "Triton, torch, driver": ", ".join((info.triton, info.torch, info.driver or "?")),
        "routing": info.routing_title,
    }


def _this_run(result: Outcome) -> dict[str, Any]:
    counts = result.counts.facts()
    seed = "-" if result.seed is None else result.seed
    return {"search space": result.space, "seed": seed, "wall time": f"{result.wall_s:.1f} s", **counts}


def _counts(trials: Trials, runs: Sequence[Run]) -> dict[str, Any]:
    """What happened over all runs."""
    every = [trial for found in trials.values() for trial in found]
    status = Counter(trial.measurement.status for trial in every)
    ended = sorted(trial.ended for trial in every if trial.ended is not None)
    return {
        "trials": len(every),
        "timed in full": status["ok"],
        "raced out": status["raced_out"],
        "rejected after compiling": status["rejected"],
        "failed": status["failed"],
        "distinct configs": len({trial.measurement.job.config for trial in every}),
        "first and last trial": f"{ended[0]:%Y-%m-%d %H:%M:%S} to {ended[-1]:%Y-%m-%d %H:%M:%S}" if ended else "-",
        **{
            f"run {run.tag}": f"{run.space} space, {run.trials} trials, seed {run.seed}, {len(run.batch_sizes)} batch "
            f"sizes: {'finished' if run.finished else 'not finished'}"
            for run in runs
        },
    }


def _pruned(measurements: Iterable[Measurement]) -> list[tuple[str, int, str]]:
    """How trials ended before their time, how many, and the most frequent message."""
    messages: dict[str, Counter[str]] = {}
    for one in measurements:
        if one.status == "raced_out":
            best = "slower than what it had to beat after the rounds it got"
            messages.setdefault("raced out", Counter())[best] += 1
        elif one.failure is not None:
            how = "rejected after compiling" if one.status == "rejected" else f"failed: {one.failure.reason}"
            messages.setdefault(how, Counter())[one.failure.message] += 1
    return [(how, said.total(), _short(said)) for how, said in sorted(messages.items())]


def _short(said: Mapping[str, int]) -> str:
    most = max(said, key=lambda text: said[text])
    return most if len(most) <= 200 else most[:199] + "…"
