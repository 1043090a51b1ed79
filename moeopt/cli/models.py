"""``moeopt models``: the table of families, or how a model's shape is derived."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from moeopt.cli import options as o
from moeopt.errors import InvalidInputError


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("models")(o.with_groups(models, without=("model",)))


def models(
    model: Annotated[
        Path | None,
        typer.Argument(help="A model's directory or config.json. Default: print the table of families."),
    ] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the model families that are known, or the shape of one model and the keys it came from."""
    if model is None:
        if given != o.NO_SHAPE:
            raise InvalidInputError("shape options were given without a model: give its config.json as the argument")
        _print_families(as_json)
        return
    shape, lines = replace(given, model=model).resolve()
    if as_json:
        typer.echo(json.dumps({"shape": shape.to_dict(), "derivation": lines}, indent=2))
    else:
        for line in lines:
            typer.echo(line)


def _print_families(as_json: bool) -> None:
    from moeopt.models.families import TABLE_HEADER, family_table

    rows = family_table()
    if as_json:
        typer.echo(json.dumps([dict(zip(TABLE_HEADER, row, strict=True)) for row in rows], indent=2))
        return
    for row in rows:
        typer.echo(row[0])
        for title, text in zip(TABLE_HEADER[1:], row[1:], strict=True):
            typer.echo(f"  {title + ':':<25}{text}")
    typer.echo(f"{len(rows)} families; any other model: keys are found by probing, and printed.")
