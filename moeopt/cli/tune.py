"""``moeopt tune``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moeopt import engines
from moeopt.cli import options as o
from moeopt.cli.signals import end_on_sigterm
from moeopt.core.shape import DEFAULT_BATCH_SIZES, MoEShape
from moeopt.devices import open_device
from moeopt.distributed.board import share
from moeopt.errors import DeviceError, InvalidInputError
from moeopt.export.write import refuse_unmeasured
from moeopt.files import check_file, check_writable
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions
from moeopt.result import TuneResult
from moeopt.storage.store import StudyStore
from moeopt.study_file import StudyFile
from moeopt.tuning.options import DEFAULT_STORAGE, TuneOptions, parse_timeout
from moeopt.tuning.progress import TuneProgress
from moeopt.tuning.tuner import Tuner


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("tune")(o.with_shape(tune))


def tune(
    study: Annotated[Path | None, typer.Argument(help="A study file (TOML).", show_default=False)] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="cuda:0, all, or recorded:FILE. Default: the first CUDA GPU.")
    ] = None,
    batch_sizes: o.BatchSizesOption = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="split: a config for each projection; joint: one for both (vLLM).")
    ] = None,
    space: Annotated[str | None, typer.Option("--space", help="grid or wide.")] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="builtin, sglang, vllm or auto.")] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", help="Launch configs that may be timed per batch size and role.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", help="End with the best so far after this long, such as 90s or 5m.")
    ] = None,
    routing: Annotated[str | None, typer.Option("--routing", help="uniform, zipf:S, dirichlet:A or file:PATH.")] = None,
    storage: o.StorageOption = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the search. Default: 0.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Compile processes. Default: cores - 1.")] = None,
    warm_l2: Annotated[
        bool, typer.Option("--warm-l2", help="Let weights stay in L2 between launches, unlike serving.")
    ] = False,
    executor: Annotated[
        str, typer.Option("--executor", help="local, or ray for the GPUs of the Ray cluster at RAY_ADDRESS.")
    ] = "local",
    wait_idle: Annotated[
        str | None, typer.Option("--wait-idle", help="Wait this long for a busy GPU to be quiet before timing.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option("--export", help="Write config files: sglang:DIR or vllm:DIR.", metavar="ENGINE:DIR"),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML report.")] = None,
) -> None:
    """Find the fastest launch configs for a shape, per batch size, and write the engines' files."""
    engines.get(given.engine)
    file = StudyFile.load(study) if study is not None else None
    if file is not None and given.given():
        raise InvalidInputError("a study file and shape options were both given: the study file holds the shape")
    console = Console(soft_wrap=True, highlight=False)
    shape: MoEShape | None = None
    if file is not None:
        shape = file.shape
    elif given.given() or not (gpu or "").startswith("recorded:"):
        shape, lines = given.resolve()
        for line in lines:
            console.print(line, markup=False)
    merged = _merge(
        file,
        batch_sizes=o.parse_batch_sizes(batch_sizes),
        gpu=gpu,
        mode=mode,
        space=space,
        kernel=kernel,
        trials=trials,
        timeout=timeout,
        routing=routing,
        storage=storage,
        seed=seed,
        workers=workers,
    )
    exports = [_parse_export(text) for text in export or ()]
    if file is not None and file.export_engine and file.export_directory and not exports:
        exports = [(file.export_engine, file.export_directory)]
    for _, directory in exports:
        check_writable(directory)
        refuse_unmeasured(directory)
    check_file(json_path)
    check_file(report)
    device_options = DeviceOptions(
        kernel=merged.get("kernel", "auto"),
        engine=exports[0][0] if exports else None,
        routing=merged.get("routing", "uniform"),
        workers=merged.get("workers"),
        warm_l2=warm_l2,
        wait_idle=parse_timeout(wait_idle, "--wait-idle") or 0.0,
        executor=executor,
    )
    # Everything that can be refused is looked at before a GPU is touched.
    options = TuneOptions(
        batch_sizes=merged.get("batch_sizes") or DEFAULT_BATCH_SIZES,
        mode=merged.get("mode", "split"),
        space=merged.get("space", "grid"),
        trials=merged.get("trials", 24),
        timeout=parse_timeout(merged.get("timeout")),
        seed=merged.get("seed", 0),
    )
    with ExitStack() as stack:
        store = stack.enter_context(StudyStore(merged.get("storage", DEFAULT_STORAGE)))
        device = stack.enter_context(_open(merged.get("gpu"), shape, device_options, options, file))
        if not merged.get("batch_sizes") and device.spec.batch_sizes:
            options = replace(options, batch_sizes=device.spec.batch_sizes)
        console.print(device.spec.provenance.source, markup=False)
        end_on_sigterm()
        tuner = Tuner(device, store, options, share=share)
        with TuneProgress(options.trials * len(tuner.cells)) as progress:
            tuner.progress = progress
            result = TuneResult.of(tuner.run())
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
    for name in ("M", "default µs", "up µs", "down µs", "speed-up", "roofline", "up config", "down config", "timed"):
        table.add_column(name, justify="left" if "config" in name else "right", no_wrap=True)
    for m, row in sorted(result.rows.items()):
        speedup, fraction = row.speedup, row.roofline_fraction
        table.add_row(
            str(m),
            f"{row.default_us:.1f}" if row.default_us is not None else "-",
            f"{row.up.us:.1f}",
            f"{row.down.us:.1f}",
            f"{speedup:.2f}x" if speedup is not None else "-",
            f"{100 * fraction:.0f} %" if fraction is not None else "-",
            str(row.up.config),
            str(row.down.config),
            f"{row.up.measured}+{row.down.measured} of {legal}",
        )
    wide = Console(width=max(console.width, 150), highlight=False, file=console.file)
    wide.print(table)
    c = result.counts
    reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(c.reasons.items()))
    left_out = "do not fit the GPU" + (" or are not in the recording" if result.info.recorded else "")
    console.print(
        f"{c.measured} timed now ({c.raced_out} of them raced out), {c.resumed} from the study database, "
        f"{c.rejected} rejected after compiling, {c.failed} failed{f' ({reasons})' if reasons else ''}; "
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


def _open(
    gpu: str | None, shape: MoEShape | None, device_options: DeviceOptions, options: TuneOptions, file: StudyFile | None
) -> Device:
    """The device; a study file may name a recording that stands in where there is no GPU."""
    try:
        return open_device(gpu, shape, device_options, batch_sizes=options.batch_sizes)
    except DeviceError:
        if gpu is not None or file is None or file.recording is None or _cuda_present():
            raise
        return open_device(f"recorded:{file.recording}", shape, DeviceOptions())


def _cuda_present() -> bool:
    import torch

    return torch.cuda.is_available()


def _merge(file: StudyFile | None, **given: Any) -> dict[str, Any]:
    """Options of the study file, and over them those of the command line."""
    return {**(dict(file.tune) if file else {}), **{k: v for k, v in given.items() if v is not None}}


def _parse_export(text: str) -> tuple[str, Path]:
    engine, colon, directory = text.partition(":")
    if engine not in engines.names() or not colon or not directory:
        raise InvalidInputError(f"--export is {text!r}: give {' or '.join(f'{n}:DIR' for n in engines.names())}")
    return engine, Path(directory)
