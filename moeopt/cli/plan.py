"""``moeopt plan``."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from moeopt.cli import options as o
from moeopt.core.shape import ROLES
from moeopt.files import check_file, write_file
from moeopt.tuning.plan import Plan, make_plan

GIB: Final = 1024**3
# Resident memory of one, measured while it compiled.
COMPILE_PROCESS_GIB: Final = 0.33


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan")(o.with_groups(plan))


def plan(
    study: Annotated[Path | None, typer.Argument(help="A study file (TOML).", show_default=False)] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    gpu: Annotated[str | None, typer.Option("--gpu", help=f"cuda:0 for the GPU here, or {o.GPU_SPEC}.")] = None,
    batch_sizes: o.BatchSizesOption = None,
    space: Annotated[str | None, typer.Option("--space", help="grid or wide.")] = None,
    trials: Annotated[int | None, typer.Option("--trials", help="Launch configs per batch size and role.")] = None,
    triton: Annotated[
        str | None, typer.Option("--triton", help="Triton version of the server. Default: the one here.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the plan as JSON.")] = None,
) -> None:
    """Say what would be tuned: file names, memory, trials, time, and the share of the space that fits the GPU."""
    check_file(json_path)
    given = given.for_engine()
    request, lines = o.read_request(o.read_study(study, given), given, gpu)
    sizes = o.parse_batch_sizes(batch_sizes)
    options = {"gpu": gpu, "batch_sizes": sizes, "space": space, "trials": trials}
    request = request.with_options({name: value for name, value in options.items() if value is not None})
    made = make_plan(request, triton or version("triton"), given.request())
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if made.recording is not None:
        console.print(f"{made.recording} would be replayed: nothing would be measured on this machine")
    for line in lines:
        console.print(line)
    share = 100 * made.legal / made.configs
    console.print(f"shape   {made.shape.slug()} on {made.gpu.name}")
    console.print(f"space   {made.space}: {made.legal} of {made.configs} configs fit the GPU ({share:.0f} %)")
    console.print(
        f"trials  at most {made.trials} for each of {len(made.batch_sizes)} batch sizes and {len(ROLES)} projections: "
        f"{made.timed} timed, {100 * made.trials / max(1, made.legal):.1f} % of the legal configs each"
    )
    console.print(f"memory  {_memory(made)}")
    if made.seconds is not None and made.compiled_seconds is not None:
        processes = f"{made.cores} compile process{'es' if made.cores > 1 else ''}"
        console.print(
            f"time    about {made.seconds:.0f} s with {processes}, {made.compiled_seconds:.0f} s if "
            "moeopt compile has filled Triton's cache before (estimates, not measured)"
        )
    for name, plan in made.engines.items():
        said = f"  {plan.serving}" if plan.serving is not None else ""
        for text in filter(None, (*plan.files, said, plan.note)):
            console.print(f"{name:7} {text}")
    if json_path is not None:
        write_file(json_path, json.dumps(made.to_dict(), indent=1) + "\n")


def _memory(made: Plan) -> str:
    needs = f"takes {made.memory_bytes / GIB:.1f} GiB, needs {made.least_memory_bytes / GIB:.1f} GiB"
    if made.gpu.unified_memory:
        return (
            f"{needs} of the memory that {made.gpu.name} shares with its host, and {COMPILE_PROCESS_GIB} GiB for each "
            "of the compile processes: what the system and its programs leave of it shows only there"
        )
    if made.least_memory_bytes > made.gpu.memory_bytes:
        return f"{needs}, more than the GPU's {made.gpu.memory_bytes / GIB:.0f} GiB: omit the largest batch sizes"
    return f"{needs} of the GPU's {made.gpu.memory_bytes / GIB:.0f} GiB: a server there must leave as much, or stop"
