"""``moeopt plan``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moeopt import engines
from moeopt.cli import options as o
from moeopt.core import limits as resources
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import DEFAULT_BATCH_SIZES, ROLES, MoEShape, check_batch_sizes
from moeopt.core.space import SearchSpace
from moeopt.errors import DeviceError, InvalidInputError
from moeopt.export import ConfigName
from moeopt.files import check_file, write_file
from moeopt.recordings.format import Recording
from moeopt.recordings.shipped import find_recording
from moeopt.study_file import StudyFile
from moeopt.tuning.options import check_trials

GIB = 1024**3
# Resident memory of one, measured while it compiled.
COMPILE_PROCESS_GIB = 0.33


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan")(o.with_shape(plan))


@dataclass(frozen=True)
class Plan:
    """What a tune would do.

    Attributes:
        shape: The layer.
        gpu: Where.
        batch_sizes: M.
        space: Name of the space.
        configs: Configs of the space.
        legal: Of these, how many fit the GPU.
        trials: Most that may be timed per (batch size, projection).
        memory_bytes: GPU memory that a tune takes.
        least_memory_bytes: What it can do with.
        seconds: Estimated wall time, or None where the GPU's rates are not known.
        compiled_seconds: The same where ``moeopt compile`` has filled Triton's cache.
        cores: Compile processes that the estimate counts on.
        files: Names of the files that would be written, per engine.
    """

    shape: MoEShape
    gpu: GpuSpec
    batch_sizes: tuple[int, ...]
    space: str
    configs: int
    legal: int
    trials: int
    memory_bytes: int
    least_memory_bytes: int
    seconds: float | None
    compiled_seconds: float | None
    cores: int
    files: dict[str, list[str]]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "shape": self.shape.to_dict(),
            "gpu": self.gpu.name,
            "batch_sizes": list(self.batch_sizes),
            "space": {"name": self.space, "configs": self.configs, "legal": self.legal},
            "trials": self.trials,
            "timed_at_most": self.trials * len(self.batch_sizes) * len(ROLES),
            "memory_bytes": self.memory_bytes,
            "least_memory_bytes": self.least_memory_bytes,
            "memory_shared_with_host": self.gpu.unified_memory,
            "estimated_seconds": self.seconds,
            "estimated_seconds_compiled_before": self.compiled_seconds,
            "cores": self.cores,
            "files": self.files,
        }


def make_plan(
    shape: MoEShape, gpu: GpuSpec, batch_sizes: tuple[int, ...], space: str, trials: int, triton: str
) -> Plan:
    """What a tune of this shape on this GPU would do.

    Raises:
        InvalidInputError: The space is unknown or has no legal config.
    """
    from moeopt.costmodel.model import estimate_tune_seconds
    from moeopt.kernels.memory import memory_needed

    chosen = SearchSpace.named(space, shape)
    configs = chosen.configs()
    legal = sum(all(resources.illegal_reason(c, shape, role, gpu) is None for role in ROLES) for c in configs)
    cores = max(1, (os.cpu_count() or 2) - 1)
    need = memory_needed(shape, batch_sizes, l2_bytes=gpu.l2_bytes)
    return Plan(
        shape=shape,
        gpu=gpu,
        batch_sizes=batch_sizes,
        space=space,
        configs=len(configs),
        legal=legal,
        trials=trials,
        memory_bytes=need.total,
        least_memory_bytes=need.least + need.context,
        seconds=estimate_tune_seconds(shape, gpu, batch_sizes, trials, cores),
        compiled_seconds=estimate_tune_seconds(shape, gpu, batch_sizes, trials, cores, compiled=True),
        cores=cores,
        files={engine: _file_names(engine, shape, gpu, triton) for engine in engines.names()},
    )


def _file_names(engine: str, shape: MoEShape, gpu: GpuSpec, triton: str) -> list[str]:
    names = dict.fromkeys(str(ConfigName.of(engine, shape, gpu.name, role)) for role in ROLES)
    place = engines.get(engine).layout.place(Path(), triton)
    return [(place / name).as_posix() for name in names]


def plan(
    study: Annotated[Path | None, typer.Argument(help="A study file (TOML).", show_default=False)] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    gpu: Annotated[str | None, typer.Option("--gpu", help="A GPU by name, or cuda:0 for the one here.")] = None,
    batch_sizes: o.BatchSizesOption = None,
    space: Annotated[str | None, typer.Option("--space", help="grid or wide.")] = None,
    trials: Annotated[int | None, typer.Option("--trials", help="Launch configs per batch size and role.")] = None,
    triton: Annotated[
        str | None, typer.Option("--triton", help="Triton version of the server. Default: the one here.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the plan as JSON.")] = None,
) -> None:
    """Say what would be tuned: file names, memory, trials, time, and the share of the space that fits the GPU."""
    file = StudyFile.load(study) if study is not None else None
    if file is not None and given.given():
        raise InvalidInputError("a study file and shape options were both given: the study file holds the shape")
    check_file(json_path)
    tune = dict(file.tune) if file is not None else {}
    name = gpu or tune.get("gpu")
    recording = _recording(name, file)
    shape: MoEShape
    lines: list[str] = []
    if file is not None:
        shape = file.shape
    elif recording is not None and not given.given():
        shape = recording.shape
    else:
        shape, lines = given.resolve()
    if recording is not None and recording.shape != shape:
        raise InvalidInputError(
            f"{recording.path} is a recording of {recording.shape.slug()}, and {shape.slug()} was asked for: "
            "omit the shape, or name a GPU"
        )
    sizes = recording.batch_sizes if recording is not None else DEFAULT_BATCH_SIZES
    made = make_plan(
        shape,
        recording.gpu if recording is not None else _gpu(name),
        o.parse_batch_sizes(batch_sizes) or check_batch_sizes(tune.get("batch_sizes", sizes)),
        space or tune.get("space", "grid"),
        check_trials(tune.get("trials", 24) if trials is None else trials),
        triton or version("triton"),
    )
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if recording is not None:
        console.print(f"{recording.path.name} would be replayed: nothing would be measured on this machine")
    for line in lines:
        console.print(line)
    share = 100 * made.legal / made.configs
    timed = made.trials * len(made.batch_sizes) * len(ROLES)
    console.print(f"shape   {shape.slug()} on {made.gpu.name}")
    console.print(f"space   {made.space}: {made.legal} of {made.configs} configs fit the GPU ({share:.0f} %)")
    console.print(
        f"trials  at most {made.trials} for each of {len(made.batch_sizes)} batch sizes and {len(ROLES)} projections: "
        f"{timed} timed, {100 * made.trials / max(1, made.legal):.1f} % of the legal configs each"
    )
    console.print(f"memory  {_memory(made)}")
    if made.seconds is not None and made.compiled_seconds is not None:
        console.print(
            f"time    about {made.seconds:.0f} s with {made.cores} compile processes, {made.compiled_seconds:.0f} s if "
            "moeopt compile has filled Triton's cache before (estimates, not measured)"
        )
    for name, files in made.files.items():
        for path in files:
            console.print(f"{name:7} {path}")
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
        return f"{needs}, more than the GPU's {made.gpu.memory_bytes / GIB:.0f} GiB: leave the largest batch sizes out"
    return f"{needs} of the GPU's {made.gpu.memory_bytes / GIB:.0f} GiB: a server there must leave as much, or stop"


def _gpu(name: str | None) -> GpuSpec:
    if name is None or name in ("auto", "cuda", "all"):
        return GpuSpec.detect(0)
    kind, _, index = name.partition(":")
    if kind == "cuda" and index.isdigit():
        return GpuSpec.detect(int(index))
    return GpuSpec.by_name(name)


def _recording(name: str | None, file: StudyFile | None) -> Recording | None:
    """The recording that a tune would replay: one that is named, or a study file's where there is no GPU."""
    if name is not None and name.startswith("recorded:"):
        return Recording.load(find_recording(name.removeprefix("recorded:")))
    if name is not None or file is None or file.recording is None:
        return None
    try:
        GpuSpec.detect(0)
    except DeviceError:
        return Recording.load(file.recording)
    return None
