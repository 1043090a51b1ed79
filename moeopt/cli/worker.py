"""``moeopt worker``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console

from moeopt.cli import options as o
from moeopt.cli.signals import end_on_sigterm
from moeopt.devices import open_device
from moeopt.distributed.worker import Worker, find_work
from moeopt.errors import InvalidInputError
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions
from moeopt.storage.store import StudyKey, StudyStore
from moeopt.tuning.options import parse_timeout


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("worker")(worker)


def worker(
    storage: o.StorageOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="cuda:0, all, or recorded:FILE. Default: the first CUDA GPU.")
    ] = None,
    idle: Annotated[str, typer.Option("--idle", help="End when nothing was to do for this long.")] = "60s",
    workers: Annotated[int | None, typer.Option("--workers", help="Compile processes.")] = None,
    routing: Annotated[
        str | None, typer.Option("--routing", help="file:PATH, where the tune was given such a file.")
    ] = None,
) -> None:
    """Join a running tune from another GPU or machine: time what it asks for."""
    idle_s = parse_timeout(idle, "--idle") or 60.0
    if storage is None:
        raise InvalidInputError("--storage is missing: give the URL of the database server that the tune was given")
    console = Console(highlight=False)
    end_on_sigterm()  # claims go back at once
    with ExitStack() as stack:
        store = stack.enter_context(StudyStore(storage))
        store.require_shared()
        device = _device(store, gpu, idle_s, DeviceOptions(workers=workers), routing)
        if device is None:
            console.print(f"no tune on such a GPU was found in {store.display}: ended", markup=False)
            return
        stack.enter_context(device)
        console.print(device.spec.provenance.source, markup=False)
        one = Worker(store, device)
        try:
            one.run(idle_s)
        except KeyboardInterrupt:
            console.print(f"interrupted: {one.timed} timed, claims given back", markup=False)
            raise typer.Exit(130) from None
        console.print(f"{one.timed} timed; nothing came for {idle_s:g} s: ended", markup=False)


def _device(
    store: StudyStore, gpu: str | None, idle_s: float, options: DeviceOptions, routing: str | None
) -> Device | None:
    """A recording stands for its shape; a GPU takes that of the tune that it joins."""
    if gpu is not None and gpu.startswith("recorded:"):
        return open_device(gpu, None, options)
    from moeopt.core.gpu import GpuSpec

    index = int(gpu.removeprefix("cuda:")) if gpu is not None and gpu.removeprefix("cuda:").isdigit() else 0
    key = find_work(store, GpuSpec.detect(index).name, idle_s)
    if key is None:
        return None
    batch_sizes = tuple(sorted({cell.batch_size for cell in store.study_ids(key).values()}))
    device = open_device(
        gpu,
        key.shape,
        DeviceOptions.as_measured(key.provenance, routing, workers=options.workers),
        batch_sizes=batch_sizes,
    )
    here = StudyKey.of(device, key.mode)
    if here != key:
        device.close()
        raise InvalidInputError(f"this machine cannot join the tune of {key.title()}: here {here.difference(key)}")
    return device
