"""``moeopt export``."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moeopt import engines
from moeopt.api import load
from moeopt.cli import options as o
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role
from moeopt.core.trial import Cell, Job
from moeopt.devices import open_device
from moeopt.errors import InvalidInputError
from moeopt.export import (
    InterpolatedTimes,
    Ladder,
    Rung,
    export_configs,
    find_rungs,
    install_configs,
    read_config_file,
    start_line,
    with_rungs,
)
from moeopt.export.extra_batch_sizes import TimeUs
from moeopt.export.names import full_gpu_name
from moeopt.files import check_file, write_file
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions
from moeopt.result import TuneResult
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import DEFAULT_STORAGE


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("export")(o.with_groups(export, without=("engine",)))


def export(
    target: Annotated[
        str, typer.Argument(help="sglang:DIR or vllm:DIR; with --install only sglang or vllm.", metavar="ENGINE:DIR")
    ],
    storage: o.StorageOption = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    mode: o.ModeOption = None,
    key: o.KeyOption = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Drop other batch sizes of existing files instead of keeping them.")
    ] = False,
    install: Annotated[
        bool, typer.Option("--install", help="Write where the engine reads, and print how to start the server.")
    ] = False,
    engine_dir: Annotated[
        Path | None,
        typer.Option("--engine-dir", help="The engine's package directory where it is not importable here."),
    ] = None,
    ladder: Annotated[
        str | None,
        typer.Option(
            "--ladder",
            help="auto: add batch sizes where the nearest one's config is over 2 % slower than the neighbour's.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="With --ladder: measure there (cuda:0, recorded:FILE) instead of estimating."),
    ] = None,
    routing: Annotated[
        str | None, typer.Option("--routing", help="With --gpu: file:PATH, where the tune was given such a file.")
    ] = None,
    triton: Annotated[
        str | None, typer.Option("--triton", help="Triton version of the server. Default: the one tuned with.")
    ] = None,
    gpu_name: Annotated[
        str | None, typer.Option("--gpu-name", help="The server's GPU as torch names it. Default: the one tuned on.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write what was written as JSON.")] = None,
) -> None:
    """Write or merge the engines' config files from a study database."""
    engine, directory = _target(target, install)
    _check_options(install, engine_dir, ladder, gpu, routing)
    check_file(json_path)
    given = dataclasses.replace(given, engine=engine)
    shape = given.resolve()[0] if given.given() else None
    result = load(storage, shape, mode=mode, key=key)
    console = Console(soft_wrap=True, highlight=False)
    up, down = result.configs_for(engine)
    left_out = result.left_out(engine)
    if left_out:
        console.print(f"note: {left_out}", markup=False)
    rungs: tuple[Rung, ...] = ()
    if ladder:
        found, how = _ladder(result, storage, gpu, routing, engine, up, down)
        rungs = found.rungs
        _say_ladder(console, found, how, measured=gpu is not None)
        up, down = with_rungs(up, down, rungs)
    server_gpu, server_triton = full_gpu_name(gpu_name or result.gpu), triton or result.info.triton
    said = ""
    if install:
        done = install_configs(
            engine,
            result.shape,
            server_gpu,
            server_triton,
            up,
            down,
            replace=replace,
            package=engine_dir,
            model=str(given.model) if given.model else None,
        )
        paths, said, start = list(done.paths), done.said, done.start
    else:
        paths = export_configs(engine, directory, result.shape, server_gpu, server_triton, up, down, replace=replace)
        start = start_line(engine, directory, result.shape, str(given.model) if given.model else None)
    for path in paths:
        count = len(read_config_file(path, engine=engine).entries)
        console.print(f"wrote {path} ({count} batch sizes)", markup=False)
    if said:
        console.print(said, markup=False)
    console.print(f"start the server with: {start}", markup=False)
    if json_path is not None:
        answer = {
            "engine": engine,
            "paths": [str(path) for path in paths],
            "batch_sizes": sorted(up),
            "added": [
                {
                    "batch_size": r.batch_size,
                    "copied_from": r.copied_from,
                    "worst_at": r.worst_at,
                    "gain": round(r.gain, 4),
                }
                for r in rungs
            ],
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


def _check_options(
    install: bool, engine_dir: Path | None, ladder: str | None, gpu: str | None, routing: str | None
) -> None:
    if engine_dir is not None and not install:
        raise InvalidInputError("--engine-dir goes with --install")
    if ladder not in (None, "auto"):
        raise InvalidInputError(f"--ladder is {ladder!r}: give auto, or omit it")
    if gpu is not None and ladder is None:
        raise InvalidInputError("--gpu goes with --ladder auto: nothing else is measured here")
    if routing is not None and gpu is None:
        raise InvalidInputError("--routing goes with --gpu: nothing is measured without it")


def _say_ladder(console: Console, found: Ladder, how: str, *, measured: bool) -> None:
    for rung in found.rungs:
        console.print(
            f"added batch size {rung.batch_size} with the configs of {rung.copied_from}: at M={rung.worst_at} the "
            f"nearest key's are {100 * rung.gain:.1f} % slower",
            markup=False,
        )
    if found.rungs:
        console.print(f"these times are {how}", markup=False)
    elif not found.unknown:
        console.print(f"no batch size to add: the nearest key is within 2 % at every midpoint ({how})", markup=False)
    if found.unknown:
        measure = "" if measured else ": give --gpu to measure there"
        console.print(
            f"nothing is known of {len(found.unknown)} midpoints (M={', '.join(map(str, found.unknown))}){measure}",
            markup=False,
        )


def _ladder(
    result: TuneResult,
    storage: str | None,
    gpu: str | None,
    routing: str | None,
    engine: str,
    up: dict[int, LaunchConfig],
    down: dict[int, LaunchConfig] | None,
) -> tuple[Ladder, str]:
    if gpu is None:
        return find_rungs(up, down, _stored_times(result, storage)), "estimated from the timed batch sizes around it"
    recorded = gpu.startswith("recorded:")
    options = DeviceOptions() if recorded else DeviceOptions.as_measured(result.info, routing, engine=engine)
    with open_device(gpu, result.shape, options, batch_sizes=result.batch_sizes) as device:
        how = "estimated between the batch sizes of a recording" if recorded else "measured on the GPU"
        return find_rungs(up, down, _measured_times(device)), how


def _stored_times(result: TuneResult, storage: str | None) -> TimeUs:
    """Estimates from everything that the database holds for the result's key."""
    times: dict[tuple[Role, LaunchConfig], dict[int, float]] = defaultdict(dict)
    joint = False
    if result.key is not None:
        with StudyStore(DEFAULT_STORAGE if storage is None else storage, create=False) as store:
            cells = next((tuple(s.cells) for s in store.keys() if s.key == result.key), ())  # noqa: SIM118
            for cell, trials in store.load(result.key, cells).items():
                for measurement in (t.measurement for t in trials):
                    if not measurement.us or (cell.role == "joint" and measurement.status != "ok"):
                        continue
                    joint |= cell.role == "joint"
                    role: Role = "up" if cell.role == "joint" else cell.role
                    times[role, measurement.job.config][cell.batch_size] = measurement.median_us
    estimate = InterpolatedTimes(times)
    # A joint time is of both launches: it stands under up.
    return (lambda role, m, config: estimate(role, m, config) if role == "up" else 0.0) if joint else estimate


def _measured_times(device: Device) -> TimeUs:
    """Times from the device, each asked for once; between the batch sizes of a recording they are estimated."""
    known: dict[tuple[Role, int, LaunchConfig], float | None] = {}
    sizes = device.spec.batch_sizes

    def measured(role: Role, batch_size: int, config: LaunchConfig) -> float | None:
        key = role, batch_size, config
        if key not in known:
            known[key] = None
            for measurement in device.measure([Job(Cell(role, batch_size), config)]):
                known[key] = measurement.median_us if measurement.us else None
        return known[key]

    def time_us(role: Role, batch_size: int, config: LaunchConfig) -> float | None:
        if sizes is None or batch_size in sizes:
            return measured(role, batch_size, config)
        around = (
            max((m for m in sizes if m < batch_size), default=0),
            min((m for m in sizes if m > batch_size), default=0),
        )
        times = {m: us for m in around if m and (us := measured(role, m, config)) is not None}
        return InterpolatedTimes({(role, config): times})(role, batch_size, config)

    return time_us
