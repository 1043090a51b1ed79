"""``moeopt worker``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console

from moeopt.cli import options as o
from moeopt.cli.signals import end_on_sigterm
from moeopt.devices import open_worker_device
from moeopt.distributed.worker import Worker
from moeopt.errors import InvalidInputError
from moeopt.storage.store import StudyStore
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
        device = open_worker_device(store, gpu, idle_s, workers=workers, routing=routing)
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
