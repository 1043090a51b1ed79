"""``moeopt export``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moeopt import engines
from moeopt.api import load
from moeopt.cli import options as o
from moeopt.core.table import ConfigTable
from moeopt.devices import open_device
from moeopt.errors import InvalidInputError
from moeopt.export import (
    ExtraBatchSizes,
    export_configs,
    find_extra_batch_sizes,
    install_configs,
    read_config_file,
    start_line,
)
from moeopt.export.other_gpu import table_for_gpu
from moeopt.files import check_file, write_file
from moeopt.measure.options import DeviceOptions
from moeopt.result import TuneResult
from moeopt.storage.store import StudyStore
from moeopt.tuning.launch_times import measured_times, stored_times
from moeopt.tuning.options import DEFAULT_STORAGE


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("export")(o.with_groups(export, without=("engine",)))


@dataclass(frozen=True)
class ExportOptions:
    """How files are written; :func:`moeopt.cli.options.with_groups` makes options of the fields."""

    replace: Annotated[
        bool, typer.Option("--replace", help="Drop other batch sizes of existing files instead of keeping them.")
    ] = False
    install: Annotated[
        bool, typer.Option("--install", help="Write where the engine reads, and print how to start the server.")
    ] = False
    engine_dir: Annotated[
        Path | None,
        typer.Option("--engine-dir", help="The engine's package directory where it is not importable here."),
    ] = None
    ladder: Annotated[
        str | None,
        typer.Option(
            "--ladder",
            help="auto: add batch sizes where the nearest one's config is over 2 % slower than the neighbour's.",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="With --ladder: measure there (cuda:0, recorded:FILE) instead of estimating."),
    ] = None
    routing: Annotated[
        str | None, typer.Option("--routing", help="With --gpu: file:PATH, where the tune was given such a file.")
    ] = None
    triton: Annotated[
        str | None, typer.Option("--triton", help="Triton version of the server. Default: the one tuned with.")
    ] = None
    gpu_name: Annotated[
        str | None, typer.Option("--gpu-name", help="The server's GPU as torch names it. Default: the one tuned on.")
    ] = None

    def check(self) -> None:
        """Raises InvalidInputError where one is without the other that it goes with."""
        if self.engine_dir is not None and not self.install:
            raise InvalidInputError("--engine-dir goes with --install")
        if self.ladder not in (None, "auto"):
            raise InvalidInputError(f"--ladder is {self.ladder!r}: give auto, or omit it")
        if self.gpu is not None and self.ladder is None:
            raise InvalidInputError("--gpu goes with --ladder auto: nothing else is measured here")
        if self.routing is not None and self.gpu is None:
            raise InvalidInputError("--routing goes with --gpu: nothing is measured without it")


def export(
    target: Annotated[str, typer.Argument(help=f"{o.TARGETS}; with --install only {o.ENGINES}.", metavar="ENGINE:DIR")],
    storage: o.StorageOption = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    mode: o.ModeOption = None,
    key: o.KeyOption = None,
    options: ExportOptions = ExportOptions(),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write what was written as JSON.")] = None,
) -> None:
    """Write or merge the engines' config files from a study database."""
    engine, directory = _target(target, options.install)
    options.check()
    check_file(json_path)
    given = replace(given, engine=engine)
    asked = given.request()
    derived = asked.derive() if asked is not None else None
    shape = derived[0] if derived is not None else given.resolve()[0] if given.given() else None
    checkpoint = derived[1].checkpoint if derived is not None else None
    result = load(storage, shape, mode=mode, key=key)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    table = result.configs_for(engine)
    left_out = result.left_out(engine)
    if left_out:
        console.print(f"note: {left_out}")
    extra = ExtraBatchSizes()
    if options.ladder:
        extra, how = _find_extra(result, table, storage, engine, options)
        _print_extra(console, extra, how, "" if options.gpu else ": give --gpu to measure there")
        table = extra.added_to(table)
    there = table_for_gpu(table, result.shape, result.gpu, options.gpu_name)
    for note in there.notes:
        console.print(f"note: {note}")
    table = there.table
    server = result.shape, there.gpu_name, options.triton or result.info.triton
    model, said = str(given.model) if given.model else None, ""
    if options.install:
        done = install_configs(
            engine,
            *server,
            table,
            replace=options.replace,
            package=options.engine_dir,
            model=model,
            checkpoint=checkpoint,
        )
        paths, said, start = list(done.paths), done.said, done.start
    else:
        paths = export_configs(engine, directory, *server, table, replace=options.replace)
        start = start_line(engine, directory, result.shape, model, checkpoint)
    for path in paths:
        count = len(read_config_file(path, engine=engine).entries)
        console.print(f"wrote {path} ({count} batch sizes)")
    if said:
        console.print(said)
    console.print(f"start the server with: {start}")
    if json_path is not None:
        added = [
            {"batch_size": e.batch_size, "copied_from": e.copied_from, "worst_at": e.worst_at, "gain": round(e.gain, 4)}
            for e in extra.found
        ]
        answer = {
            "engine": engine,
            "paths": [str(path) for path in paths],
            "batch_sizes": sorted(table),
            "added": added,
            "start": start,
        }
        write_file(json_path, json.dumps(answer, indent=1) + "\n")


def _target(target: str, install: bool) -> tuple[str, str]:
    """The engine, and the directory: empty with --install, which finds one."""
    name, colon, directory = target.partition(":")
    engine = engines.get(name).name
    if install and colon:
        raise InvalidInputError(f"{target!r} names a directory and --install finds one: give one of them")
    if not install and not directory:
        raise InvalidInputError(f"{target!r} names no directory: give {engine}:DIR, or --install")
    return engine, directory


def _find_extra(
    result: TuneResult, table: ConfigTable, storage: str | None, engine: str, options: ExportOptions
) -> tuple[ExtraBatchSizes, str]:
    """Batch sizes to add, and how their times are known."""
    gpu = options.gpu
    if gpu is None:
        assert result.key is not None  # it was loaded
        with StudyStore(DEFAULT_STORAGE if storage is None else storage, create=False) as store:
            found = find_extra_batch_sizes(table, stored_times(store, result.key))
        return found, "estimated from the timed batch sizes around it"
    recorded = gpu.startswith("recorded:")
    how = DeviceOptions() if recorded else DeviceOptions.as_measured(result.info, options.routing, engine=engine)
    with open_device(gpu, result.shape, how, batch_sizes=result.batch_sizes) as device:
        said = "estimated between the batch sizes of a recording" if recorded else "measured on the GPU"
        return find_extra_batch_sizes(table, measured_times(device)), said


def _print_extra(console: Console, extra: ExtraBatchSizes, how: str, hint: str) -> None:
    for one in extra.found:
        console.print(
            f"added batch size {one.batch_size} with the configs of {one.copied_from}: at M={one.worst_at} the "
            f"nearest key's are {100 * one.gain:.1f} % slower"
        )
    if extra.found:
        console.print(f"these times are {how}")
    elif not extra.unknown:
        console.print(f"no batch size to add: the nearest key is within 2 % at every midpoint ({how})")
    if extra.unknown:
        console.print(
            f"nothing is known of {len(extra.unknown)} midpoints (M={', '.join(map(str, extra.unknown))}){hint}"
        )
