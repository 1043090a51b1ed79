"""From what a user names (``cuda:0``, ``all``, ``recorded:FILE``) to a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moeopt.errors import InvalidInputError, RecordingError
from moeopt.kernels import KERNEL_NAMES
from moeopt.kernels.routing import Routing
from moeopt.measure.base import Device
from moeopt.shape import MoEShape

# Ends the key of a routing where weights may stay in L2: these times must not share a study with cold ones.
WARM_L2: Final = ", warm L2"


@dataclass(frozen=True)
class DeviceOptions:
    """How a GPU is used. A recording's times are what they are: another kernel or routing is refused for it.

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
        if self.kernel not in KERNEL_NAMES:
            raise InvalidInputError(f"kernel {self.kernel!r} is unknown: give one of {', '.join(KERNEL_NAMES)}")
        if self.workers is not None and self.workers < 1:
            raise InvalidInputError(f"workers is {self.workers}: give at least 1 compile process")
        Routing.parse(self.routing)

    @classmethod
    def as_measured(cls, kernel: str, routing: str, given: str | None = None, **options: Any) -> DeviceOptions:
        """Options that measure as earlier times were measured.

        Args:
            kernel: Theirs.
            routing: Key of theirs, as :class:`~moeopt.measure.base.DeviceInfo` has it.
            given: The routing that the user names, which a file needs: a key holds its hash, not its path.
            **options: The others.

        Raises:
            InvalidInputError: Another routing is given, or a file is needed and none is given.
        """
        key = routing.removesuffix(WARM_L2)
        if key.startswith("file:") and given is None:
            raise InvalidInputError("these times are of a routing file: give it again with --routing file:PATH")
        if given is not None and Routing.parse(given).key != key:
            raise InvalidInputError(f"routing {given!r} was given, and these times are of {key!r}: leave it away")
        return cls(kernel=kernel, routing=given or key, warm_l2=routing != key, **options)


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
        from moeopt.measure.ray_open import open_ray

        return open_ray(gpu, shape, options, batch_sizes=batch_sizes)
    if gpu is not None and gpu.startswith("recorded:"):
        return _recorded(gpu.removeprefix("recorded:"), shape, options)
    if shape is None:
        raise InvalidInputError("no shape was given: only a recording (--gpu recorded:FILE) stands for its own")
    indices = _cuda_indices(gpu)
    from moeopt.measure.cuda import open_cuda

    return open_cuda(shape, indices, options, batch_sizes=batch_sizes)


def _recorded(name: str, shape: MoEShape | None, options: DeviceOptions) -> Device:
    from moeopt.measure.recording import RecordedDevice, Recording
    from moeopt.study_file import find_recording

    recording = Recording.load(find_recording(name))
    if shape is not None and shape != recording.shape:
        raise RecordingError(
            f"{recording.path} is a recording of {recording.shape.slug()}, and {shape.slug()} was asked for: "
            "leave the shape away, or give a recording of it"
        )
    device = RecordedDevice(recording)
    if options.kernel not in ("auto", device.info.kernel):
        raise RecordingError(
            f"{recording.path} is a recording of the {device.info.kernel} kernel, and {options.kernel} was asked for: "
            "leave the kernel away, or give a recording of it"
        )
    if options.routing != DeviceOptions.routing and Routing.parse(options.routing).key != (
        device.info.routing.removesuffix(WARM_L2)
    ):
        raise RecordingError(
            f"{recording.path} is a recording of {device.info.routing} routing, and {options.routing} was asked for: "
            "leave the routing away, or give a recording of it"
        )
    if options.warm_l2 and not device.info.routing.endswith(WARM_L2):
        raise RecordingError(
            f"{recording.path} was measured with a cold L2, and a warm one was asked for: leave --warm-l2 away, or "
            "give a recording of it"
        )
    return device


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
