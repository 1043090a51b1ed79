"""Notes and plots that make optuna-dashboard useful for launch configs.

A note that a person has edited is left as it is.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from moeopt.core.trial import Cell
from moeopt.errors import InvalidInputError
from moeopt.storage.store import StoredTrial, StudyKey, StudyStore, StudySummary
from moeopt.tuning.load import load_result
from moeopt.tuning.outcome import BatchResult, Outcome

if TYPE_CHECKING:
    import optuna
    from plotly.graph_objects import Figure

_log = logging.getLogger(__name__)
_HASH_ATTR: Final = "moeopt:shown"
_NOTE_PREFIX: Final = "dashboard:note_str:"
_LATENCY, _SPEEDUP = "moeopt-latency", "moeopt-speedup"


def annotate(store: StudyStore, progress: Callable[[str], None] = lambda name: None) -> int:
    """Writes the note and the plots of every study that has trials, where they have changed.

    Args:
        store: An open database.
        progress: Told of each key.

    Returns:
        How many studies were written.

    Raises:
        InvalidInputError: optuna-dashboard or plotly is not installed.
    """
    _require()
    store.refresh()
    written = 0
    for summary in store.keys():  # noqa: SIM118  (a method of ours, no dict)
        if summary.trials:
            progress(summary.key.title())
            written += _annotate_key(store, summary)
    return written


def _annotate_key(store: StudyStore, summary: StudySummary) -> int:
    key, cells = summary.key, tuple(summary.cells)
    trials = store.load(key, cells)
    result = load_result(store, key, trials)
    figures: dict[str, Figure] = {}
    if result.rows:
        figures[_LATENCY] = latency_figure(result)
        speedup = speedup_figure(result)
        if speedup is not None:
            figures[_SPEEDUP] = speedup
    for figure in figures.values():
        figure.update_layout(template="none")  # a template is seven times the plot, in every study
    changed = {}
    for cell in cells:
        if trials[cell]:
            study = store.optuna_study(key, cell)
            attrs = _system_attrs(study, note(key, cell, trials[cell], result), figures)
            if attrs:
                changed[study._study_id] = attrs
    store.backend.set_system_attrs(changed)
    return len(changed)


def _system_attrs(study: optuna.Study, body: str, figures: dict[str, Figure]) -> dict[str, Any]:
    """The system attributes that show a note and plots, as far as they change.

    optuna-dashboard writes them one by one, a transaction each; here it writes to memory.
    """
    import optuna
    from optuna_dashboard import save_note, save_plotly_graph_object

    there = study._storage.get_study_system_attrs(study._study_id)
    plots = "".join(figure.to_json() or "" for figure in figures.values())
    new = {"note": _digest(body), "plots": _digest(plots)}
    old = there.get(_HASH_ATTR, {"note": "", "plots": ""})
    shown = get_note(there)
    edited = bool(shown) and _digest(shown) != old["note"]
    if edited:
        new["note"] = old["note"]
    if new == old:
        return {}
    memory = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    for name, value in there.items():
        memory._storage.set_study_system_attr(memory._study_id, name, value)
    if not edited:
        save_note(memory, body)
    for graph, figure in figures.items():
        save_plotly_graph_object(memory, figure, graph_object_id=graph)
    after = memory._storage.get_study_system_attrs(memory._study_id)
    changed = {name: value for name, value in after.items() if name not in there or there[name] != value}
    return {**changed, _HASH_ATTR: new}


def latency_figure(result: Outcome) -> Figure:
    """Microseconds against batch size: default, up, down, both, roofline."""
    import plotly.graph_objects as go

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
    import plotly.graph_objects as go

    figure = go.Figure(go.Bar(x=[m for m, _ in known], y=[s for _, s in known], text=[f"{s:.2f}x" for _, s in known]))
    figure.add_hline(y=1.0, line_dash="dot")
    figure.update_layout(title="Speed-up over the engine's default config", template="plotly_white")
    figure.update_xaxes(type="category", title="batch size M (tokens)")
    figure.update_yaxes(title="default time / tuned time")
    return figure


def get_note(system_attrs: Mapping[str, Any]) -> str:
    """The text of a study's note, as the dashboard shows it."""
    parts = {k: v for k, v in system_attrs.items() if k.startswith(_NOTE_PREFIX)}
    return "".join(parts[name] for name in sorted(parts, key=lambda k: int(k.removeprefix(_NOTE_PREFIX))))


def note(key: StudyKey, cell: Cell, trials: Sequence[StoredTrial], result: Outcome) -> str:
    """A study's note in Markdown: what it is of, how fast, and what was pruned and why."""
    lines = [
        f"## {_what(cell)}, {cell.batch_size} {'token' if cell.batch_size == 1 else 'tokens'}",
        f"{key.shape.slug()} on **{key.gpu}**"
        + (" (replayed from a recording: nothing was measured here)" if key.provenance.recorded else ""),
        "",
    ]
    row = result.rows.get(cell.batch_size)
    if row is not None:
        lines += _best_lines(cell, row)
    lines += ["", *_count_lines(trials), "", "| key | value |", "| --- | --- |"]
    lines += [f"| {name.replace('_', ' ')} | {_shown(value)} |" for name, value in key.attrs().items()]
    return "\n".join(lines) + "\n"


def _what(cell: Cell) -> str:
    return {"up": "Gate and up projection", "down": "Down projection", "joint": "Both projections"}[cell.role]


def _best_lines(cell: Cell, row: BatchResult) -> list[str]:
    part = row.up if cell.role == "up" else row.down
    us, default, roofline = (
        (row.total_us, row.default_us, row.roofline_us)
        if cell.role == "joint"
        else (part.us, part.default_us, part.roofline_us)
    )
    out = [f"- chosen: `{part.config}`, **{us:.1f} µs**"]
    if default is not None:
        out.append(f"- **{default / us:.2f}x** the engine's default ({default:.1f} µs)")
    if roofline is not None:
        out.append(f"- **{100 * roofline / us:.0f} %** of the roofline ({roofline:.1f} µs)")
    if row.speedup is not None and cell.role != "joint":
        out.append(f"- both projections: {row.total_us:.1f} µs, {row.speedup:.2f}x the default")
    return out


def _count_lines(trials: Sequence[StoredTrial]) -> list[str]:
    status = Counter(trial.measurement.status for trial in trials)
    reasons = Counter(
        ("rejected after compiling" if m.status == "rejected" else m.failure.reason)
        for m in (trial.measurement for trial in trials)
        if m.failure is not None
    )
    pruned = [f"{status['raced_out']} raced out"] if status["raced_out"] else []
    pruned += [f"{count} {reason}" for reason, count in sorted(reasons.items())]
    out = [f"{len(trials)} trials: {status['ok']} fully timed, {len(trials) - status['ok']} pruned"]
    return [out[0] + (f" ({', '.join(pruned)})" if pruned else "")]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items() if part is not None)
    return str(value) if value != "" else "?"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require() -> None:
    try:
        import optuna_dashboard  # noqa: F401
        import plotly  # noqa: F401
    except ImportError:
        raise InvalidInputError("the dashboard needs optuna-dashboard: pip install 'moeopt[dashboard]'") from None


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """One slow request (parameter importance) does not hold up the others."""

    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


@contextmanager
def serve(store: StudyStore, port: int = 8080, *, refresh_s: float = 30.0) -> Iterator[str]:
    """Serves optuna-dashboard on 127.0.0.1 from a thread, and keeps notes and plots up to date.

    Args:
        store: An open database.
        port: 0 for any that is free.
        refresh_s: Seconds between two looks for new trials.

    Yields:
        Its address.

    Raises:
        InvalidInputError: The port is taken, or optuna-dashboard is not installed.
    """
    _require()
    from optuna_dashboard import wsgi

    try:
        server: WSGIServer = make_server(
            "127.0.0.1", port, wsgi(store.backend.storage), _ThreadingServer, handler_class=_QuietHandler
        )
    except OSError as error:
        raise InvalidInputError(f"cannot listen on port {port} ({error.strerror}): give another --port") from None
    end = threading.Event()
    threads = [
        threading.Thread(target=server.serve_forever, name="moeopt-dashboard", daemon=True),
        threading.Thread(target=_keep_annotating, args=(store.url, end, refresh_s), name="moeopt-notes", daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/dashboard"
    finally:
        end.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join(timeout=10.0)


def _keep_annotating(url: str, end: threading.Event, refresh_s: float) -> None:
    with StudyStore(url, create=False) as store:
        while not end.wait(refresh_s):
            annotate(store)
