"""The executors under test, each with two GPUs: this machine's, and a Ray cluster of two nodes."""

from __future__ import annotations

import functools
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moeopt.compile import CompilePool
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.kernels.base import MoEKernel
from moeopt.measure.base import Device
from moeopt.measure.compile_queue import Compiler
from moeopt.measure.multi_gpu import MultiGpuDevice

ROOT = Path(__file__).parents[2]
# Of each node of the Ray cluster: a core for the GPU's actor, and one to compile on.
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


class Executor(ABC):
    """Opens two GPUs as one device."""

    name: str

    @abstractmethod
    def open(self, make: Callable[[], Device]) -> Device:
        """A device over two GPUs that ``make`` opens."""

    @abstractmethod
    def compiler(self, cache: Path) -> Callable[[MoEKernel, MoEShape, GpuSpec], Compiler]:
        """What gives a GPU its compiler; all GPUs have one between them."""

    @abstractmethod
    def kill(self, device: Device, directory: Path) -> None:
        """kill -9 of what a machine can lose while the device measures."""

    def close(self) -> None:
        """Ends what was started."""


class LocalExecutor(Executor):
    """Two GPUs of this process."""

    name = "local"

    def open(self, make: Callable[[], Device]) -> Device:
        return MultiGpuDevice([make(), make()])

    def compiler(self, cache: Path) -> Callable[[MoEKernel, MoEShape, GpuSpec], Compiler]:
        pools: list[CompilePool] = []

        def shared(kernel: MoEKernel, shape: MoEShape, gpu: GpuSpec) -> Compiler:
            if not pools:
                pools.append(CompilePool(kernel, shape, gpu.compute_capability, workers=2, cache_dir=cache))
            return pools[0]

        return shared

    def kill(self, device: Device, directory: Path) -> None:
        """The worker process of one GPU."""
        os.kill(int((directory / "worker1").read_text()), signal.SIGKILL)


class RayExecutor(Executor):
    """A GPU on each of two nodes of a Ray cluster."""

    name = "ray"

    def __init__(self, directory: Path) -> None:
        """Starts it; each node has a Triton cache of its own in the directory, as on two machines."""
        import ray
        from ray.cluster_utils import Cluster

        self.ray: Any = ray
        self.caches = [directory / "first", directory / "second"]
        head = {**self._node(0), "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.second: Any = None
        self.restore()
        env = {"env_vars": {"PYTHONPATH": str(ROOT)}}
        ray.init(address=self.cluster.address, log_to_driver=False, runtime_env=env)

    def _node(self, number: int) -> dict[str, Any]:
        return {**NODE, "env_vars": {"TRITON_CACHE_DIR": str(self.caches[number])}}

    def open(self, make: Callable[[], Device]) -> Device:
        from moeopt.distributed.ray_device import RayDevice

        return RayDevice(make, 2)

    def compiler(self, cache: Path) -> Callable[[MoEKernel, MoEShape, GpuSpec], Compiler]:
        from moeopt.distributed.ray_open import start_broker

        return functools.partial(_ray_compiler, start_broker(reserved=2, workers=None), cache)

    def kill(self, device: Device, directory: Path) -> None:
        """The second node, its GPU's actor and its compile tasks with it."""
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None

    def restore(self) -> None:
        """Puts a new node in the place of one that was killed."""
        if self.second is None:
            self.second = self.cluster.add_node(**self._node(1))
            self.cluster.wait_for_nodes()

    def close(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()


def _ray_compiler(broker: Any, cache: Path, kernel: MoEKernel, shape: MoEShape, gpu: GpuSpec) -> Compiler:
    from moeopt.distributed.ray_compile import CompileSetup, RayCompiler

    return RayCompiler(broker, CompileSetup(kernel, shape, gpu.compute_capability, cache))
