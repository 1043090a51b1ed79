"""A result as one HTML page that needs nothing else: tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeopt.errors import InvalidInputError
from moeopt.files import write_file
from moeopt.tuning.outcome import Outcome

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_COLUMNS: Final = (
    "M", "default µs", "up µs", "down µs", "both µs", "speed-up", "of roofline", "up config", "down config",
)  # fmt: skip
_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .7rem; text-align: right }
th { border-bottom: 2px solid #8b949e } tr:nth-child(even) td { background: #f3f5f7 } .l { text-align: left }
.note { border-left: 4px solid #bf8700; padding: .2rem .8rem; background: #fff8e6 }
</style></head><body><h1>{{ title }}</h1>
{% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
<table><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>
{%- for name in columns %}<td{% if "config" in name %} class="l"{% endif %}>{{ row[name] }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for plot in plots %}{{ plot | safe }}
{% endfor %}<h2>The run</h2><table>
{% for name, value in facts.items() %}<tr><th class="l">{{ name }}</th><td class="l">{{ value }}</td></tr>
{% endfor %}</table></body></html>
"""


def latency_figure(result: Outcome) -> Figure:
    """Microseconds against batch size: default, up, down, both, roofline."""
    go = _plotly()
    sizes = list(result.batch_sizes)
    rows = [result.rows[m] for m in sizes]
    figure = go.Figure()
    for name, values, dash in (
        ("engine's default", [row.default_us for row in rows], "dot"),
        ("tuned, both", [row.total_us for row in rows], "solid"),
        ("tuned, up", [row.up.us for row in rows], "dash"),
        ("tuned, down", [row.down.us for row in rows], "dash"),
        ("roofline, both", [row.roofline_us for row in rows], "dot"),
    ):
        if any(v is not None for v in values):
            figure.add_trace(go.Scatter(x=sizes, y=values, name=name, mode="lines+markers", line={"dash": dash}))
    figure.update_layout(title="Time of the MoE layer's two projections", template="plotly_white")
    figure.update_xaxes(type="log", title="batch size M (tokens)", tickvals=sizes)
    figure.update_yaxes(type="log", title="µs per launch")
    return figure


def speedup_figure(result: Outcome) -> Figure | None:
    """Speed-up over the engine's default per batch size, or None where no default is known."""
    known = [(str(m), row.speedup) for m, row in sorted(result.rows.items()) if row.speedup is not None]
    if not known:
        return None
    go = _plotly()
    figure = go.Figure(go.Bar(x=[m for m, _ in known], y=[s for _, s in known], text=[f"{s:.2f}x" for _, s in known]))
    figure.add_hline(y=1.0, line_dash="dot")
    figure.update_layout(title="Speed-up over the engine's default config", template="plotly_white")
    figure.update_xaxes(type="category", title="batch size M (tokens)")
    figure.update_yaxes(title="default time / tuned time")
    return figure


def write_report(result: Outcome, path: Path) -> Path:
    """Writes the page.

    Raises:
        InvalidInputError: plotly is not installed.
        ExportError: The file cannot be written.
    """
    figures = [latency_figure(result)]
    speedup = speedup_figure(result)
    if speedup is not None:
        figures.append(speedup)
    # The first figure brings plotly along, so that the page opens without a network.
    plots = [f.to_html(full_html=False, include_plotlyjs=(i == 0)) for i, f in enumerate(figures)]
    write_file(path, _page(result, plots))
    return path


def _page(result: Outcome, plots: list[str]) -> str:
    from jinja2 import Template

    info = result.info
    facts = {
        "times from": info.source,
        "kernel": info.kernel_title,
        "Triton": info.triton,
        "torch": info.torch,
        "routing": info.routing_title,
        "mode": result.mode,
        "search space": result.space,
        "seed": "-" if result.seed is None else result.seed,
        "wall time": f"{result.wall_s:.1f} s",
        **result.counts.facts(),
    }
    rows = [{**row.texts(), "of roofline": row.texts()["roofline"]} for _, row in sorted(result.rows.items())]
    title = f"{result.shape.slug()} on {result.gpu}"
    page: str = Template(_PAGE, autoescape=True, keep_trailing_newline=True).render(
        title=title, notes=result.notes, columns=_COLUMNS, rows=rows, plots=plots, facts=facts
    )
    return page


def check_plots() -> None:
    """Raises InvalidInputError where plotly, which a report needs, is not installed."""
    _plotly()


def _plotly() -> Any:
    try:
        import plotly.graph_objects
    except ImportError:
        raise InvalidInputError("a report's plots need plotly: pip install 'moeopt[plots]'") from None
    return plotly.graph_objects
