"""``moeopt suggest``."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from moeopt import engines
from moeopt.cli import options as o
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import choose_batch_sizes
from moeopt.errors import InvalidInputError


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("suggest")(o.with_groups(suggest_configs))


def suggest_configs(
    out: Annotated[Path, typer.Argument(help="A new directory for the config files.")],
    study: Annotated[Path | None, typer.Option("--study", help="Take shape and GPU from a study file.")] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    gpu: Annotated[str | None, typer.Option("--gpu", help=f"The GPU, which need not be here: {o.GPU_SPEC}.")] = None,
    batch_sizes: o.BatchSizesOption = None,
    space: Annotated[str, typer.Option("--space", help="grid or wide.")] = "grid",
    triton: Annotated[
        str | None, typer.Option("--triton", help="Triton version of the server. Default: the one here.")
    ] = None,
) -> None:
    """Write config files from the cost model, without any GPU. They are marked as unmeasured."""
    from moeopt.tuning.suggest import suggest, write_suggestions

    file = o.read_study(study, given)
    shape = file.shape if file is not None else given.resolve()[0]
    name = gpu or (file.tune.gpu if file is not None else None)
    if name is None:
        raise InvalidInputError('--gpu is missing: name the GPU, such as --gpu "NVIDIA GeForce RTX 5090"')
    target = GpuSpec.named(name)
    sizes = choose_batch_sizes(o.parse_batch_sizes(batch_sizes))
    mode: Literal["split", "joint"] = "split" if engines.get(given.rules).split else "joint"
    found = suggest(shape, target, sizes, space=space, mode=mode, engine=given.rules)
    paths = write_suggestions(given.rules, out, shape, target, triton or version("triton"), found)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"UNMEASURED: ranked for {target.name} by a cost model; tune on the GPU before you rely on it")
    for m, s in sorted(found.items()):
        configs = str(s.up) if s.up == s.down else f"up {s.up}, down {s.down}"
        gain = s.predicted_default_us / s.predicted_us
        console.print(f"M={m}: {configs}; predicted {gain:.2f}x the default's speed")
    for path in paths:
        console.print(f"wrote {path}")
