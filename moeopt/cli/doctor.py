"""``moeopt doctor``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from moeopt import engines
from moeopt.cli import options as o
from moeopt.doctor import Diagnosis, Finding, diagnose, engine_of, judge_caches, scan_log
from moeopt.errors import InvalidInputError
from moeopt.export.lookup import guess_engine
from moeopt.export.names import full_gpu_name


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(o.with_groups(doctor, without=("engine",)))


def doctor(
    log: Annotated[
        Path | None, typer.Option("--log", help="What the server printed, from its start; - is stdin.")
    ] = None,
    config_dir: Annotated[
        Path | None, typer.Option("--config-dir", help="A directory with config files, such as an engine reads.")
    ] = None,
    flashinfer: Annotated[
        Path | None,
        typer.Option("--flashinfer", help="A FlashInfer autotune cache file, or a directory of them: what it holds."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help=f"{o.ENGINES}. Default: found out from what is given.")
    ] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="The server's GPU as torch names it, such as 'NVIDIA H200'.")
    ] = None,
    triton: Annotated[str | None, typer.Option("--triton", help="Triton version of the server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Say whether a server reads tuned files at all, and if not, why.

    Exit status: 0 in use and tuned, 1 a finding, 2 bad input.
    """
    checked = engines.get(engine).name if engine is not None else None
    if flashinfer is not None:
        if log is not None or config_dir is not None or given.given():
            raise InvalidInputError("--flashinfer goes with --gpu alone: omit --log, --config-dir and shape options")
        _answer(judge_caches(flashinfer, full_gpu_name(gpu) if gpu else None), as_json)
    facts = scan_log(log) if log is not None else None
    # The rules that turn a model into a shape are the engine's, and the log knows its parallelism.
    if checked is None and facts is not None:
        checked = engine_of(facts)
    if checked is None and config_dir is not None:
        checked = guess_engine(config_dir)
    given = replace(given, engine=checked or given.engine, engine_given=checked is not None)
    request = given.request()
    if request is not None and facts is not None:
        request = request.laid_out(engines.get(given.rules).log.deployment(facts))
    shape, no_shape = None, None
    try:
        shape = request.derive()[0] if request is not None else given.resolve()[0] if given.given() else None
    except InvalidInputError as error:
        # The kernel does not serve every model; beside a log that is an answer, not bad input.
        if facts is None or given.model is None or not given.model.exists():
            raise
        no_shape = Finding("note", "model", str(error))
    answer = diagnose(
        facts,
        config_dir,
        engine=checked,
        shape=shape,
        gpu_name=gpu,
        triton_version=triton,
        request=request,
    )
    if no_shape is not None:
        answer = replace(answer, findings=(*answer.findings, no_shape))
    _answer(answer, as_json)


def _answer(answer: Diagnosis, as_json: bool) -> NoReturn:
    typer.echo(json.dumps(answer.to_dict(), indent=1) if as_json else str(answer))
    raise typer.Exit(answer.status)
