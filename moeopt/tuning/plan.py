"""Plan of a tune: what would be tuned, how long that takes and what it needs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeopt import engines
from moeopt.core import limits
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, choose_batch_sizes
from moeopt.core.space import SearchSpace
from moeopt.costmodel.model import estimate_tune_seconds
from moeopt.engines.serving import Checkpoint, Serving
from moeopt.errors import DeviceError, InvalidInputError
from moeopt.export import ConfigName
from moeopt.kernels.memory import memory_needed
from moeopt.models.request import ModelRequest
from moeopt.recordings.format import Recording
from moeopt.recordings.shipped import find_recording
from moeopt.tuning.options import TuneRequest


@dataclass(frozen=True)
class EnginePlan:
    """What a tune would be worth to one engine.

    Attributes:
        files: Names of the files that it asks for; none where it cannot load the model.
        serving: Whether it reads them by default; None where it cannot load the model.
        note: What stands in the way: that it cannot load the model, or asks for another shape than is tuned.
    """

    files: tuple[str, ...] = ()
    serving: Serving | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        found = self.serving
        return {
            "files": list(self.files),
            "reads": found.reads if found is not None else None,
            "backend": found.backend if found is not None else None,
            "option": found.option if found is not None else None,
            "note": self.note,
        }


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
        recording: Name of the recording that would be replayed, or None.
        engines: For each engine its files, and whether it would read them.
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
    recording: str | None
    engines: dict[str, EnginePlan]

    @property
    def timed(self) -> int:
        """Most (config, batch size, projection) that would be timed."""
        return self.trials * len(self.batch_sizes) * len(ROLES)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "shape": self.shape.to_dict(),
            "gpu": self.gpu.name,
            "batch_sizes": list(self.batch_sizes),
            "space": {"name": self.space, "configs": self.configs, "legal": self.legal},
            "trials": self.trials,
            "timed_at_most": self.timed,
            "memory_bytes": self.memory_bytes,
            "least_memory_bytes": self.least_memory_bytes,
            "memory_shared_with_host": self.gpu.unified_memory,
            "estimated_seconds": self.seconds,
            "estimated_seconds_compiled_before": self.compiled_seconds,
            "cores": self.cores,
            "files": {name: list(plan.files) for name, plan in self.engines.items() if plan.files},
            "engines": {name: plan.to_dict() for name, plan in self.engines.items()},
        }


def make_plan(request: TuneRequest, triton: str, model: ModelRequest | None = None) -> Plan:
    """What a tune would do.

    Args:
        request: The tune; a GPU may be named that is not here.
        triton: Triton version of the server.
        model: Whose layer it is: each engine derives its own shape from it.

    Raises:
        InvalidInputError: The space is unknown or has no legal config, or a recording is of another shape.
        DeviceError: No GPU is named, and there is none here.
    """
    recording = _recording(request)
    shape = request.shape or (recording.shape if recording is not None else None)
    if shape is None:
        raise InvalidInputError("no shape was given: only a recording (--gpu recorded:FILE) stands for its own")
    if recording is not None and recording.shape != shape:
        raise InvalidInputError(
            f"{recording.path} is a recording of {recording.shape.slug()}, and {shape.slug()} was asked for: "
            "omit the shape, or name a GPU"
        )
    gpu = recording.gpu if recording is not None else GpuSpec.named(request.gpu)
    batch_sizes = choose_batch_sizes(request.batch_sizes, recording.batch_sizes if recording is not None else None)
    space, trials = request.search.space, request.search.trials
    chosen = SearchSpace.named(space, shape)
    configs = chosen.configs()
    legal = sum(all(limits.illegal_reason(c, shape, role, gpu) is None for role in ROLES) for c in configs)
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
        recording=recording.path.name if recording is not None else None,
        engines={engine: _engine_plan(engine, shape, gpu, triton, model) for engine in engines.names()},
    )


def _engine_plan(engine: str, tuned: MoEShape, gpu: GpuSpec, triton: str, model: ModelRequest | None) -> EnginePlan:
    spec = engines.get(engine)
    checkpoint, note = Checkpoint(tuned), ""
    if model is not None:
        try:
            checkpoint = replace(model, engine=engine).derive()[1].checkpoint
        except InvalidInputError as error:
            return EnginePlan(note=str(error))
        note = other_shape(engine, tuned, checkpoint.shape)
    names = dict.fromkeys(str(ConfigName.of(engine, checkpoint.shape, gpu.name, role)) for role in ROLES)
    place = spec.layout.place(Path(), triton)
    files = tuple((place / name).as_posix() for name in names)
    return EnginePlan(files, spec.serving.serving(checkpoint, gpu), note)


def other_shape(engine: str, tuned: MoEShape, asked: MoEShape) -> str:
    """That an engine asks for another shape of a model than is tuned, in one line; empty where it does not."""
    if ConfigName.of(engine, tuned, "GPU") == ConfigName.of(engine, asked, "GPU"):
        return ""
    title = engines.get(engine).title
    names = [f"E={one.num_experts},N={one.intermediate_size}" for one in (asked, tuned)]
    if names[0] == names[1]:
        blocks = [list(one.block_shape or ()) for one in (asked, tuned)]
        names = [f"{name},block_shape={block}" for name, block in zip(names, blocks, strict=True)]
    return (
        f"{title} asks for {names[0]} of this model, and {names[1]} is tuned: one tune does not serve both, tune with "
        f"--engine {engine} for it"
    )


def _recording(request: TuneRequest) -> Recording | None:
    """The recording that a tune would replay: one that is named, or what stands in where there is no GPU."""
    if request.gpu is not None and request.gpu.startswith("recorded:"):
        return Recording.load(find_recording(request.gpu.removeprefix("recorded:")))
    if request.gpu is not None or request.stand_in is None:
        return None
    try:
        GpuSpec.detect(0)
    except DeviceError:
        return Recording.load(request.stand_in)
    return None
