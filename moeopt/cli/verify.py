"""``moeopt verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moeopt import engines
from moeopt.api import load
from moeopt.cli import options as o
from moeopt.core.shape import MoEShape
from moeopt.devices import open_device
from moeopt.errors import InvalidInputError
from moeopt.export import export_configs
from moeopt.export.write import refuse_unmeasured
from moeopt.files import check_file, check_writable, write_file
from moeopt.measure.options import DeviceOptions
from moeopt.recordings.format import Recording
from moeopt.recordings.shipped import find_recording
from moeopt.result import TuneResult
from moeopt.tuning.verify import DEFAULT_PASSES, MINIMUM_GAIN, Verification, tables_to_compare, verify


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("verify")(o.with_groups(verify_command))


def verify_command(
    tuned: Annotated[
        Path | None, typer.Option("--tuned", help="Directory with the tuned files. Default: the study database.")
    ] = None,
    existing: Annotated[
        Path | None, typer.Option("--existing", help="Directory with the files that the server reads today.")
    ] = None,
    storage: o.StorageOption = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    mode: o.ModeOption = None,
    key: o.KeyOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="cuda:0 or recorded:FILE. Default: the first CUDA GPU.")
    ] = None,
    batch_sizes: o.BatchSizesOption = None,
    kernel: Annotated[str, typer.Option("--kernel", help=o.KERNELS)] = "auto",
    routing: Annotated[str, typer.Option("--routing", help="uniform, zipf:S, dirichlet:A or file:PATH.")] = "uniform",
    passes: Annotated[int, typer.Option("--passes", help="Turns that each config gets.")] = DEFAULT_PASSES,
    minimum_gain: Annotated[
        float, typer.Option("--minimum-gain", help="Least gain, in percent, for which a row is replaced.")
    ] = 100 * MINIMUM_GAIN,
    triton: Annotated[
        str | None, typer.Option("--triton", help="Triton version of the files. Default: the one here.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the outcome as JSON.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write the rows that are kept as the engine's files.")
    ] = None,
) -> None:
    """Let default, existing and tuned configs take turns, and keep what is better than noise."""
    engine = engines.get(given.engine).name
    check_file(json_path)
    if export is not None:
        check_writable(export)
        refuse_unmeasured(export)
    shape = given.resolve()[0] if given.given() else None
    judged = _tuned(tuned, storage, mode, key, shape, gpu)
    table = judged.configs_for(engine) if isinstance(judged, TuneResult) else judged
    shape = judged.shape if isinstance(judged, TuneResult) else shape
    sizes = o.parse_batch_sizes(batch_sizes)
    console = Console(soft_wrap=True, highlight=False)
    options = DeviceOptions(kernel=kernel, engine=engine, routing=routing)
    with open_device(gpu, shape, options, batch_sizes=sizes) as device:
        spec, version = device.spec, triton or device.spec.provenance.triton
        console.print(spec.provenance.source, markup=False)
        tables = tables_to_compare(device, engine, table, existing, sizes, version)
        outcome = verify(device, tables, passes=passes, minimum_gain=minimum_gain / 100)
        written = []
        if export is not None:
            kept = outcome.configs() if engines.get(engine).split else outcome.configs().joined()
            written = export_configs(engine, export, spec.shape, spec.gpu.name, version, kept)
    print_verification(console, outcome)
    for path in written:
        console.print(f"wrote {path}", markup=False)
    if json_path is not None:
        write_file(json_path, json.dumps(outcome.to_dict(), indent=1) + "\n")


def _tuned(
    tuned: Path | None, storage: str | None, mode: str | None, key: str | None, shape: MoEShape | None, gpu: str | None
) -> Path | TuneResult:
    """What is judged: a directory with files, or what a study database holds."""
    recorded = (gpu or "").startswith("recorded:")
    if tuned is None:
        if shape is None and gpu is not None and recorded:
            shape = Recording.load(find_recording(gpu.removeprefix("recorded:"))).shape
        return load(storage, shape, mode=mode, key=key)
    if storage is not None or mode is not None or key is not None:
        raise InvalidInputError("--tuned and --storage, --mode or --key exclude each other: give one of them")
    if shape is None and not recorded:
        raise InvalidInputError("--tuned names files only: give the shape as well, with --model or --experts ...")
    return tuned


def print_verification(console: Console, outcome: Verification) -> None:
    """Prints one line per batch size and what it comes to."""
    names = list(dict.fromkeys(arm.name for row in outcome.rows for arm in row.arms))
    table = Table()
    for name in ("M", *(f"{name} µs" for name in names), "gain", "kept", "why"):
        table.add_column(name, justify="left" if name in ("kept", "why") else "right")
    for row in outcome.rows:
        times = {arm.name: arm for arm in row.arms}
        cells = [_time(times[name].total_us, times[name].interval_us) if name in times else "-" for name in names]
        low, high = (100 * v for v in row.interval)
        gain = f"{100 * row.gain:.1f} % ({low:.1f} to {high:.1f})"
        table.add_row(str(row.batch_size), *cells, gain, row.kept, row.reason)
    Console(width=max(console.width, 160), highlight=False, file=console.file).print(table)
    replaced = outcome.replaced()
    console.print(
        f"{len(replaced)} of {len(outcome.rows)} batch sizes get another row than {outcome.baseline}; "
        f"{outcome.passes} passes",
        markup=False,
    )
    if outcome.replayed:
        console.print(
            "replayed: the intervals are those of the recording's rounds, and nothing was interleaved or measured "
            "on this machine",
            markup=False,
        )
    if outcome.disturbed:
        console.print(f"{outcome.disturbed} timings were disturbed by other work on the GPU", markup=False)


def _time(total: float | None, interval: tuple[float, float] | None) -> str:
    if total is None or interval is None:
        return "failed"
    return f"{total:.1f} ± {(interval[1] - interval[0]) / 2:.1f}"
