"""``moeopt report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeopt.api import load
from moeopt.cli import options as o


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("report")(report)


def report(
    path: Annotated[Path, typer.Argument(help="The HTML page to write.")],
    storage: o.StorageOption = None,
    experts: o.ExpertsOption = None,
    top_k: o.TopKOption = None,
    hidden: o.HiddenOption = None,
    intermediate: o.IntermediateOption = None,
    dtype: o.DtypeOption = None,
    block_shape: o.BlockShapeOption = None,
    per_channel: o.PerChannelOption = False,
    group_size: o.GroupSizeOption = None,
    mode: o.ModeOption = None,
    key: o.KeyOption = None,
) -> None:
    """Write a self-contained HTML page with plots, from a study database."""
    given = o.ShapeOptions(
        None, "sglang", 1, 1, None, experts, top_k, hidden, intermediate, dtype, block_shape, per_channel, group_size
    )
    shape = given.resolve()[0] if given.given() else None
    typer.echo(f"wrote {load(storage, shape, mode=mode, key=key).report(path)}")
