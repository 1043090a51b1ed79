"""Opens the GPUs of a Ray cluster, or recordings in their place, as one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.distributed.ray_compile import CompileBroker, CompileSetup, RayCompiler
from moeopt.distributed.ray_device import RayDevice, connect, import_ray
from moeopt.errors import DeviceError
from moeopt.kernels.base import MoEKernel
from moeopt.measure.base import Device

if TYPE_CHECKING:
    from moeopt.measure.options import DeviceOptions


def open_ray(
    gpu: str | None,
    shape: MoEShape | None,
    options: DeviceOptions,
    *,
    batch_sizes: tuple[int, ...],
    open_recorded: Callable[[str, MoEShape | None, DeviceOptions], Device],
) -> RayDevice:
    """A device on all GPUs of a Ray cluster, or with a recording on all its nodes.

    Args:
        gpu: ``recorded:FILE``, or anything that stands for CUDA GPUs: the cluster says how many.
        shape: The layer; a recording stands for its own.
        options: How each GPU is used.
        batch_sizes: What will be timed.
        open_recorded: Opens the recording that is named.

    Raises:
        DeviceError: The cluster cannot be reached or has no GPU.
    """
    ray = import_ray()
    connect(ray, None)
    local = replace(options, executor="local")
    if gpu is not None and gpu.startswith("recorded:"):
        device = open_recorded(gpu.removeprefix("recorded:"), shape, local)
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        return RayDevice(functools.partial(_same, device), nodes)
    count = int(ray.cluster_resources().get("GPU", 0))
    if count == 0:
        raise DeviceError("the Ray cluster has no GPU: start its nodes where CUDA GPUs are, or give recorded:FILE")
    if shape is None:
        raise DeviceError("no shape was given: only a recording (--gpu recorded:FILE) stands for its own")
    # The driver's numbers, not those within CUDA_VISIBLE_DEVICES, are what clocks and memory are read by.
    env = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    broker = start_broker(count, options.workers)
    make = functools.partial(_open_own_gpu, broker, shape, local, batch_sizes)
    return RayDevice(make, count, num_gpus=1, runtime_env=env)


def start_broker(reserved: float, workers: int | None) -> Any:
    """The cluster's :class:`~moeopt.distributed.ray_compile.CompileBroker`, on this process's node.

    Args:
        reserved: Cores that are left to the GPUs' processes.
        workers: Most compiles at a time, or None.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(CompileBroker).options(num_cpus=0, max_concurrency=100_000, scheduling_strategy=here)
    return actor.remote(math.ceil(reserved), workers)


def _open_own_gpu(broker: Any, shape: MoEShape, options: DeviceOptions, batch_sizes: tuple[int, ...]) -> Device:
    """Runs in an actor: opens the GPU that Ray gave it."""
    from moeopt.measure.cuda import CudaDevice

    (index,) = import_ray().get_runtime_context().get_accelerator_ids()["GPU"]
    return CudaDevice(
        shape, int(index), options, batch_sizes=batch_sizes, make_pool=functools.partial(ray_compiler, broker)
    )


def ray_compiler(broker: Any, shape: MoEShape, gpu: GpuSpec, kernel: MoEKernel, options: DeviceOptions) -> RayCompiler:
    """A GPU's compiler on the cluster."""
    return RayCompiler(broker, CompileSetup(kernel, shape, gpu.compute_capability, options.compile_cache))


def _same(device: Device) -> Device:
    return device
