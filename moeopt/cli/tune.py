"""``moeopt tune``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from moeopt import engines
from moeopt.api import open_tune, run_tune
from moeopt.cli import options as o
from moeopt.cli.signals import end_on_sigterm
from moeopt.core.shape import MoEShape
from moeopt.engines.serving import Checkpoint
from moeopt.errors import InvalidInputError
from moeopt.export.write import refuse_unmeasured
from moeopt.files import check_file, check_writable
from moeopt.measure.base import DeviceSpec
from moeopt.result import TuneResult
from moeopt.tuning.options import parse_timeout
from moeopt.tuning.plan import other_shape

_COLUMNS: Final = (
    "M", "default µs", "up µs", "down µs", "speed-up", "roofline", "up config", "down config", "timed",
)  # fmt: skip


@dataclass(frozen=True)
class TuneArguments:
    """The options of a tune as they were given; :func:`moeopt.cli.options.with_groups` makes options of the fields."""

    gpu: Annotated[
        str | None, typer.Option("--gpu", help="cuda:0, all, or recorded:FILE. Default: the first CUDA GPU.")
    ] = None
    batch_sizes: o.BatchSizesOption = None
    mode: Annotated[
        str | None, typer.Option("--mode", help="split: a config for each projection; joint: one for both (vLLM).")
    ] = None
    space: Annotated[str | None, typer.Option("--space", help="grid or wide.")] = None
    kernel: Annotated[str | None, typer.Option("--kernel", help=o.KERNELS)] = None
    trials: Annotated[
        int | None, typer.Option("--trials", help="Launch configs that may be timed per batch size and role.")
    ] = None
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="End with the best so far after this long, such as 90s or 5m.")
    ] = None
    routing: Annotated[str | None, typer.Option("--routing", help="uniform, zipf:S, dirichlet:A or file:PATH.")] = None
    storage: o.StorageOption = None
    seed: Annotated[int | None, typer.Option("--seed", help="Of the search. Default: 0.")] = None
    workers: Annotated[int | None, typer.Option("--workers", help="Compile processes. Default: cores - 1.")] = None
    warm_l2: Annotated[
        bool, typer.Option("--warm-l2", help="Let weights stay in L2 between launches, unlike serving.")
    ] = False
    executor: Annotated[
        str, typer.Option("--executor", help="local, or ray for the GPUs of the Ray cluster at RAY_ADDRESS.")
    ] = "local"
    wait_idle: Annotated[
        str | None, typer.Option("--wait-idle", help="Wait this long for a busy GPU to be quiet before timing.")
    ] = None

    def given(self) -> dict[str, Any]:
        """Those that were given, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["batch_sizes"] = o.parse_batch_sizes(self.batch_sizes)
        values["wait_idle"] = parse_timeout(self.wait_idle, "--wait-idle")
        return {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("tune")(o.with_groups(tune))


def tune(
    study: Annotated[Path | None, typer.Argument(help="A study file (TOML).", show_default=False)] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    options: TuneArguments = TuneArguments(),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option("--export", help=f"Write config files: {o.TARGETS}.", metavar="ENGINE:DIR"),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML report.")] = None,
) -> None:
    """Find the fastest launch configs for a shape, per batch size, and write the engines' files."""
    exports = [_parse_export(text) for text in export or ()]
    named, given = given.named_engine, given.for_engine([name for name, _ in exports])
    file = o.read_study(study, given)
    request, lines = o.read_request(file, given, options.gpu)
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        console.print(line, markup=False)
    _check_shapes(given, request.shape, [name for name, _ in exports])
    if file is not None and file.export_engine and file.export_directory and not exports:
        exports = [(file.export_engine, file.export_directory)]
    for _, directory in exports:
        check_writable(directory)
        refuse_unmeasured(directory)
    check_file(json_path)
    check_file(report)
    # Everything that can be refused is looked at before a GPU is touched.
    for_engine = exports[0][0] if exports else named
    request = request.with_options(options.given() | ({"engine": for_engine} if for_engine else {}))
    with open_tune(request) as tuner:
        console.print(tuner.device.spec.provenance.source, markup=False)
        _ask_about_other_kernels(console, given, tuner.device.spec, [n for n, _ in exports] or [named])
        end_on_sigterm()
        result = run_tune(tuner)
        print_result(console, result, legal=len(tuner.candidates))
    for name, directory in exports:
        if result.rows:
            for path in result.export(name, directory):
                console.print(f"wrote {path}", markup=False)
            left_out = result.left_out(name)
            if left_out:
                console.print(f"note: {left_out}", markup=False)
    if json_path is not None:
        result.write_json(json_path)
    if report is not None:
        console.print(f"wrote {result.report(report)}", markup=False)
    if tuner.storage_error is not None:
        raise tuner.storage_error
    if tuner.interrupted:
        raise typer.Exit(130)


def print_result(console: Console, result: TuneResult, *, legal: int) -> None:
    """Prints the table that a tune ends with."""
    table = Table(title=f"{result.shape.slug()} on {result.gpu}, {result.mode}, {result.space} space")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if "config" in name else "right", no_wrap=True)
    for _, row in sorted(result.rows.items()):
        *texts, timed = map(row.texts().__getitem__, _COLUMNS)
        table.add_row(*texts, f"{timed} of {legal}")
    wide = Console(width=max(console.width, 150), highlight=False, file=console.file)
    wide.print(table)
    c = result.counts
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(c.reasons.items()))
    others = f", {c.elsewhere} by other processes" if c.elsewhere else ""
    kinds = ", ".join(f"{c.stored[kind]} {kind}" for kind in ("timed", "rejected", "failed") if c.stored.get(kind))
    before = f" ({kinds})" if kinds else ""
    left_out = "do not fit the GPU" + (" or are not in the recording" if result.info.recorded else "")
    console.print(
        f"{c.measured} timed now ({c.raced_out} of them raced out{others}), {c.resumed} from the study database{before}"
        f", {c.rejected} rejected after compiling, {c.failed} failed{f' ({reasons})' if reasons else ''}; "
        f"{c.unique_compiled} distinct configs; {c.infeasible} of {c.space} {left_out}; {result.wall_s:.1f} s",
        markup=False,
    )
    if c.measured == 0 and c.resumed:
        console.print("nothing was timed again: all of it was in the study database", markup=False)
    speedup = result.geomean_speedup()
    if speedup is not None:
        console.print(f"{speedup:.2f}x the engine's default, geometric mean over batch sizes", markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _ask_about_other_kernels(
    console: Console, given: o.ShapeOptions, device: DeviceSpec, names: Sequence[str | None]
) -> None:
    """Says where an engine runs another kernel by default, which reads no file; asks once on a terminal.

    Raises:
        typer.Exit: The tune is not wanted then.
    """
    model, said = given.request(), []
    for name in filter(None, dict.fromkeys(names)):
        spec = engines.get(name)
        asked = replace(model, engine=name).derive()[1].checkpoint if model is not None else Checkpoint(device.shape)
        found = spec.serving.serving(asked, device.gpu)
        if found.reads != "all":
            said.append(f"{spec.title} on {device.gpu.name}: {found}")
    for line in said:
        console.print(f"warning: {line}", markup=False)
    asks = said and sys.stdin is not None and sys.stdin.isatty() and console.is_terminal
    if asks and not typer.confirm("Tune all the same?", default=True):
        raise typer.Exit(1)


def _check_shapes(given: o.ShapeOptions, tuned: MoEShape | None, names: Collection[str]) -> None:
    """Raises InvalidInputError where an engine that files are written for asks for another shape of the model."""
    model = given.request()
    if model is None or tuned is None:
        return
    for name in dict.fromkeys(names):
        said = other_shape(name, tuned, replace(model, engine=name).derive()[0])
        if said:
            raise InvalidInputError(f"--export {name}: {said}")


def _parse_export(text: str) -> tuple[str, Path]:
    engine, colon, directory = text.partition(":")
    if engine not in engines.names() or not colon or not directory:
        raise InvalidInputError(f"--export is {text!r}: give {' or '.join(f'{n}:DIR' for n in engines.names())}")
    return engine, Path(directory)
