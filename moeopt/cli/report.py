"""``moeopt report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeopt.api import load
from moeopt.cli import options as o


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("report")(o.with_groups(report))


def report(
    path: Annotated[Path, typer.Argument(help="The HTML page to write.")],
    storage: o.StorageOption = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    mode: o.ModeOption = None,
    key: o.KeyOption = None,
) -> None:
    """Write a self-contained HTML page with plots, from a study database."""
    shape = given.resolve()[0] if given.given() else None
    typer.echo(f"wrote {load(storage, shape, mode=mode, key=key).report(path)}")
