"""From what a user names (``cuda:0``, ``all``, ``recorded:FILE``) to a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeopt.errors import InvalidInputError, RecordingError
from moeopt.measure.base import Device
from moeopt.shape import MoEShape


@dataclass(frozen=True)
class DeviceOptions:
    """How a GPU is used; a recording ignores all of it, as its times are what they are.

    Attributes:
        kernel: ``builtin``, ``sglang``, ``vllm`` or ``auto``.
        engine: The engine that the result is for, which ``auto`` looks for.
        routing: Distribution of tokens over experts, as :class:`moeopt.kernels.routing.Routing` reads it.
        seed: Of operands and routings.
        workers: Compile processes, or None for all cores but one.
        warm_l2: Whether the weights may stay in L2 between launches.
        wait_idle: Seconds to wait for a busy GPU to become quiet before each batch of timings.
        compile_cache: Directory of Triton's cache, or None for Triton's own.
        executor: ``local``, or ``ray`` for the GPUs of a Ray cluster.
    """

    kernel: str = "auto"
    engine: str | None = None
    routing: str = "uniform"
    seed: int = 0
    workers: int | None = None
    warm_l2: bool = False
    wait_idle: float = 0.0
    compile_cache: Path | None = None
    executor: str = "local"

    def __post_init__(self) -> None:
        if self.executor not in ("local", "ray"):
            raise InvalidInputError(f"executor {self.executor!r} is unknown: give 'local' or 'ray'")


def open_device(
    gpu: str | None,
    shape: MoEShape | None,
    options: DeviceOptions,
    *,
    batch_sizes: tuple[int, ...] | None = None,
) -> Device:
    """Opens the device that ``gpu`` names.

    Args:
        gpu: ``cuda:N``, ``all``, ``recorded:FILE``, or None for the first CUDA GPU.
        shape: The layer; a recording stands for its own and needs none.
        options: How a GPU is used.
        batch_sizes: What will be timed: decides how much GPU memory is taken.

    Raises:
        DeviceError: There is no such GPU, or it cannot be used.
        InvalidInputError: ``gpu`` is something else, or no shape is given where one is needed.
        RecordingError: The recording cannot be read, or is of another shape.
    """
    if options.executor == "ray":
        from moeopt.measure.ray_fleet import open_ray

        return open_ray(gpu, shape, options, batch_sizes=batch_sizes)
    if gpu is not None and gpu.startswith("recorded:"):
        return _recorded(gpu.removeprefix("recorded:"), shape)
    if shape is None:
        raise InvalidInputError("no shape was given: only a recording (--gpu recorded:FILE) stands for its own")
    indices = _cuda_indices(gpu)
    from moeopt.measure.cuda import open_cuda

    return open_cuda(shape, indices, options, batch_sizes=batch_sizes)


def _recorded(name: str, shape: MoEShape | None) -> Device:
    from moeopt.measure.recording import RecordedDevice, Recording
    from moeopt.study_file import find_recording

    recording = Recording.load(find_recording(name))
    if shape is not None and shape != recording.shape:
        raise RecordingError(
            f"{recording.path} is a recording of {recording.shape.slug()}, and {shape.slug()} was asked for: "
            "leave the shape away, or give a recording of it"
        )
    return RecordedDevice(recording)


def _cuda_indices(gpu: str | None) -> tuple[int, ...] | None:
    """GPU indices, or None for all."""
    if gpu is None or gpu in ("auto", "cuda"):
        return (0,)
    if gpu == "all":
        return None
    kind, _, index = gpu.partition(":")
    if kind == "cuda" and index.isdigit():
        return (int(index),)
    raise InvalidInputError(f"gpu {gpu!r} is unknown: give cuda:0, all, or recorded:FILE")
