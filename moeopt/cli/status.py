"""``moeopt status``."""

from __future__ import annotations

import json
import math
import time
from typing import Annotated, Final

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moeopt.cli import options as o
from moeopt.errors import InvalidInputError
from moeopt.report.status import KeyStatus, storage_status
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import DEFAULT_STORAGE

_COLUMNS: Final = (
    "M", "timed", "default µs", "up µs", "down µs", "speed-up", "roofline", "up config", "down config",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("status")(status)


def status(
    storage: o.StorageOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two looks, with --watch.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the studies of a database: trials by state and reason, best so far, time left."""
    if not 0 < interval < math.inf:
        raise InvalidInputError(f"--interval is {interval:g}: give more than 0 seconds")
    if watch and as_json:
        raise InvalidInputError("--watch and --json exclude each other: give one of them")
    with StudyStore(DEFAULT_STORAGE if storage is None else storage, create=False) as store:
        if as_json:
            found = storage_status(store)
            typer.echo(json.dumps({"storage": store.display, "studies": [one.to_dict() for one in found]}, indent=1))
        elif watch:
            with Live(_view(store), console=_console(), auto_refresh=False) as live:
                try:
                    while True:
                        time.sleep(interval)
                        live.update(_view(store), refresh=True)
                except KeyboardInterrupt:
                    return
        else:
            _console().print(_view(store))


def _console() -> Console:
    console = Console(highlight=False)
    return Console(width=max(console.width, 132), highlight=False)


def _view(store: StudyStore) -> Group:
    store.refresh()
    found = storage_status(store)
    if not found:
        return Group(Text(f"{store.display}: no studies yet"))
    return Group(Text(store.display), *(part for one in found for part in _key_view(one)))


def _key_view(one: KeyStatus) -> list[Text | Table]:
    key, made = one.key, one.key.provenance
    states = ", ".join(f"{n} {state.lower()}" for state, n in one.states.items()) or "no trials"
    reasons = ", ".join(f"{n} {reason}" for reason, n in one.reasons.items())
    title = Text(f"\n{key.title()}, {key.mode}", style="bold")
    versions = f"{made.kernel_title} {made.kernel_hash}".strip()
    lines = [
        title,
        Text(f"kernel {versions}; driver {made.driver or '?'}; torch {made.torch or '?'}; key {key.digest}"),
        Text(f"{sum(one.states.values())} trials: {states}{f' ({reasons})' if reasons else ''}"),
    ]
    for run in one.runs:
        state = "finished" if run.finished else "not finished"
        lines.append(Text(f"run {run.tag}: {run.space} space, {run.trials} trials, seed {run.seed}: {state}"))
    if one.seconds_left is not None:
        lines.append(Text(f"about {_duration(one.seconds_left)} left"))
    elif one.last is not None:
        lines.append(Text(f"last trial {one.last:%Y-%m-%d %H:%M:%S}"))
    table = Table()
    titles = {"timed": "timed up+down"}
    for name in _COLUMNS:
        table.add_column(titles.get(name, name), justify="left" if "config" in name else "right", no_wrap=True)
    for _, row in sorted(one.rows.items()):
        table.add_row(*map(row.texts().__getitem__, _COLUMNS))
    return [*lines, table] if one.rows else [*lines]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
