"""Devices by the name that a user gives: ``cuda:0``, ``all``, ``recorded:FILE``."""

from __future__ import annotations

from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError, RecordingError
from moeopt.kernels.routing import Routing
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions


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
        from moeopt.distributed.ray_open import open_ray

        return open_ray(gpu, shape, options, batch_sizes=batch_sizes, open_recorded=_recorded)
    if gpu is not None and gpu.startswith("recorded:"):
        return _recorded(gpu.removeprefix("recorded:"), shape, options)
    if shape is None:
        raise InvalidInputError("no shape was given: only a recording (--gpu recorded:FILE) stands for its own")
    indices = _cuda_indices(gpu)
    from moeopt.measure.cuda import open_cuda

    return open_cuda(shape, indices, options, batch_sizes=batch_sizes)


def _recorded(name: str, shape: MoEShape | None, options: DeviceOptions) -> Device:
    from moeopt.recordings.device import RecordedDevice
    from moeopt.recordings.format import Recording
    from moeopt.recordings.shipped import find_recording

    recording = Recording.load(find_recording(name))
    if shape is not None and shape != recording.shape:
        raise RecordingError(
            f"{recording.path} is a recording of {recording.shape.slug()}, and {shape.slug()} was asked for: "
            "omit the shape, or give a recording of it"
        )
    device = RecordedDevice(recording)
    info = device.spec.provenance
    if options.kernel not in ("auto", info.kernel):
        raise RecordingError(
            f"{recording.path} is a recording of the {info.kernel} kernel, and {options.kernel} was asked for: "
            "omit the kernel, or give a recording of it"
        )
    if options.routing != DeviceOptions.routing and Routing.parse(options.routing).key != info.routing:
        raise RecordingError(
            f"{recording.path} is a recording of {info.routing_title} routing, and {options.routing} was asked "
            "for: omit the routing, or give a recording of it"
        )
    if options.warm_l2 and not info.warm_l2:
        raise RecordingError(
            f"{recording.path} was measured with a cold L2, and a warm one was asked for: omit --warm-l2, or "
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
