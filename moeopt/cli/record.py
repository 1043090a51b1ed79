"""``moeopt record``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from moeopt.cli import options as o
from moeopt.cli.signals import end_on_sigterm
from moeopt.core.shape import choose_batch_sizes
from moeopt.core.space import SearchSpace
from moeopt.devices import open_device
from moeopt.errors import InvalidInputError
from moeopt.measure.options import DeviceOptions
from moeopt.recordings.record import Recorder


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("record")(o.with_groups(record))


def record(
    out: Annotated[Path, typer.Argument(help="The recording to write, ending in .jsonl.gz.")],
    study: Annotated[Path | None, typer.Option("--study", help="Take the shape from a study file.")] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    gpu: Annotated[str, typer.Option("--gpu", help="cuda:0 or all.")] = "cuda:0",
    batch_sizes: o.BatchSizesOption = None,
    space: Annotated[str, typer.Option("--space", help="grid or wide.")] = "grid",
    sample: Annotated[
        int | None, typer.Option("--sample", help="Record only this many configs of the space, picked evenly.")
    ] = None,
    kernel: Annotated[str, typer.Option("--kernel", help=o.KERNELS)] = "builtin",
    routing: Annotated[str, typer.Option("--routing", help="uniform, zipf:S, dirichlet:A or file:PATH.")] = "uniform",
    workers: Annotated[int | None, typer.Option("--workers", help="Compile processes. Default: cores - 1.")] = None,
    slow_factor: Annotated[
        float, typer.Option("--slow-factor", help="A config this much slower than the best is timed once only.")
    ] = 3.0,
    contribute: Annotated[
        bool,
        typer.Option(
            "--contribute", help="Also bundle the recording for sharing, without names of host, user or paths."
        ),
    ] = False,
) -> None:
    """Measure a whole space on a GPU and write a recording, which can stand in for the GPU later."""
    if not out.name.endswith(".jsonl.gz"):
        raise InvalidInputError(f"the recording {str(out)!r} must end in .jsonl.gz")
    if out.exists():
        raise InvalidInputError(f"{out} is there already: move it away, or give another path")
    if not 1 < slow_factor < math.inf:
        raise InvalidInputError(f"--slow-factor is {slow_factor:g}: give more than 1")
    if sample is not None and sample < 1:
        raise InvalidInputError(f"--sample is {sample}: give at least 1")
    file = o.read_study(study, given)
    shape = file.shape if file is not None else given.resolve()[0]
    sizes = choose_batch_sizes(o.parse_batch_sizes(batch_sizes))
    console = Console(soft_wrap=True, highlight=False)
    options = DeviceOptions(kernel=kernel, engine=given.named_engine, routing=routing, workers=workers)
    end_on_sigterm()
    with open_device(gpu, shape, options, batch_sizes=sizes) as device:
        console.print(device.spec.provenance.source, markup=False)
        chosen = SearchSpace.named(space, shape, extras=device.spec.space_extras)
        recorder = Recorder(device, chosen, sizes, out, slow_factor=slow_factor, limit=sample)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("recording", total=len(recorder.configs))
            path = recorder.run(lambda done, total: progress.update(task, completed=done, total=total))
    console.print(f"wrote {path}", markup=False)
    if contribute:
        from moeopt.recordings.bundle import bundle_recording

        console.print(f"wrote {bundle_recording(path)}: attach it to an issue of the project", markup=False)
