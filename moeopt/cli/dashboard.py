"""``moeopt dashboard``."""

from __future__ import annotations

import math
import threading
from typing import Annotated

import typer
from rich.console import Console

from moeopt.cli import options as o
from moeopt.errors import InvalidInputError
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import DEFAULT_STORAGE


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("dashboard")(dashboard)


def dashboard(
    storage: o.StorageOption = None,
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1; 0 for any that is free.")] = 8080,
    refresh: Annotated[float, typer.Option("--refresh", help="Seconds between two looks for new trials.")] = 30.0,
) -> None:
    """Serve optuna-dashboard on 127.0.0.1, with a note and plots in each study."""
    from moeopt.report.dashboard import annotate, serve

    if not 0 <= port <= 65535:
        raise InvalidInputError(f"--port is {port}: give 0 to 65535")
    if not 0 < refresh < math.inf:
        raise InvalidInputError(f"--refresh is {refresh:g}: give more than 0 seconds")
    console = Console(highlight=False)
    with StudyStore(DEFAULT_STORAGE if storage is None else storage, create=False) as store:
        annotate(store, lambda name: console.print(f"notes and plots: {name}", markup=False))
        with serve(store, port, refresh_s=refresh) as address:
            console.print(f"{store.display} at {address} (Ctrl-C ends)", markup=False)
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                return
