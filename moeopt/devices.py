"""Devices that a user names: ``cuda:0``, ``all``, ``recorded:FILE``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeopt.core.gpu import GpuSpec, cuda_index
from moeopt.core.shape import MoEShape, choose_batch_sizes
from moeopt.errors import InvalidInputError, RecordingError
from moeopt.kernels.routing import Routing
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions

if TYPE_CHECKING:
    from moeopt.storage.store import StudyStore


def open_device(
    gpu: str | None,
    shape: MoEShape | None,
    options: DeviceOptions,
    *,
    batch_sizes: Sequence[int] | None = None,
) -> Device:
    """Opens the device that ``gpu`` names.

    Args:
        gpu: ``cuda:N``, ``all``, ``recorded:FILE``, or None for the first CUDA GPU.
        shape: The layer; a recording stands for its own and needs none.
        options: How a GPU is used.
        batch_sizes: What will be timed, which decides how much GPU memory is taken; None for the default.

    Raises:
        DeviceError: There is no such GPU, or it cannot be used.
        InvalidInputError: ``gpu`` is something else, or no shape is given where one is needed.
        RecordingError: The recording cannot be read, or is of another shape.
    """
    sizes = choose_batch_sizes(batch_sizes)
    if options.executor == "ray":
        from moeopt.distributed.ray_open import open_ray

        return open_ray(gpu, shape, options, batch_sizes=sizes, open_recorded=_recorded)
    if gpu is not None and gpu.startswith("recorded:"):
        return _recorded(gpu.removeprefix("recorded:"), shape, options)
    if shape is None:
        raise InvalidInputError("no shape was given: only a recording (--gpu recorded:FILE) stands for its own")
    indices = _cuda_indices(gpu)
    from moeopt.measure.cuda import open_cuda

    return open_cuda(shape, indices, options, batch_sizes=sizes)


def open_worker_device(
    store: StudyStore, gpu: str | None, idle_s: float, *, workers: int | None = None, routing: str | None = None
) -> Device | None:
    """Opens a device that can join a tune: a recording stands for its own, a GPU takes that of an unfinished tune.

    Args:
        store: The database server that the tune was given.
        gpu: As for :func:`open_device`.
        idle_s: Seconds to wait for a tune on such a GPU.
        workers: Compile processes, or None for all cores but one.
        routing: The file of the tune's routing, where it was given one.

    Returns:
        The device, or None where no tune came.

    Raises:
        InvalidInputError: Here is another kernel, driver or Triton than the tune's.
    """
    if gpu is not None and gpu.startswith("recorded:"):
        return open_device(gpu, None, DeviceOptions(workers=workers))
    from moeopt.distributed.worker import find_work
    from moeopt.storage.key import StudyKey

    index, *_ = _cuda_indices(gpu) or (0,)
    key = find_work(store, GpuSpec.detect(index).name, idle_s)
    if key is None:
        return None
    batch_sizes = {cell.batch_size for cell in store.study_ids(key).values()}
    options = DeviceOptions.as_measured(key.provenance, routing, workers=workers)
    device = open_device(gpu, key.shape, options, batch_sizes=tuple(batch_sizes))
    here = StudyKey.of(device, key.mode)
    if here != key:
        device.close()
        raise InvalidInputError(f"this machine cannot join the tune of {key.title()}: here {here.difference(key)}")
    return device


def _recorded(name: str, shape: MoEShape | None, options: DeviceOptions) -> Device:
    from moeopt.recordings.device import RecordedDevice
    from moeopt.recordings.format import Recording
    from moeopt.recordings.shipped import find_recording

    recording = Recording.load(find_recording(name))
    device = RecordedDevice(recording)
    info = device.spec.provenance
    routing = Routing.parse(options.routing).key
    for what, is_of, asked, other in (
        ("shape", recording.shape.slug(), shape.slug() if shape else "", shape not in (None, recording.shape)),
        ("kernel", f"the {info.kernel} kernel", options.kernel, options.kernel not in ("auto", info.kernel)),
        ("routing", f"{info.routing_title} routing", options.routing, routing not in ("uniform", info.routing)),
    ):
        if other:
            raise RecordingError(
                f"{recording.path} is a recording of {is_of}, and {asked} was asked for: omit the {what}, or give a "
                "recording of it"
            )
    if options.warm_l2 and not info.warm_l2:
        raise RecordingError(
            f"{recording.path} was measured with a cold L2, and a warm one was asked for: omit --warm-l2, or "
            "give a recording of it"
        )
    return device


def _cuda_indices(gpu: str | None) -> tuple[int, ...] | None:
    """GPU indices, or None for all."""
    if gpu == "all":
        return None
    index = cuda_index("auto" if gpu is None else gpu)
    if index is None:
        raise InvalidInputError(f"gpu {gpu!r} is unknown: give cuda:0, all, or recorded:FILE")
    return (index,)
