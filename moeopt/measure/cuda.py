"""CUDA GPUs as devices."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moeopt.compile import CompilePool
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import Provenance
from moeopt.core.shape import ROLES, MoEShape, choose_batch_sizes
from moeopt.core.trial import Cell
from moeopt.errors import DeviceError, UnknownGpuError
from moeopt.kernels.base import MoEKernel
from moeopt.measure.base import Device, DeviceSpec
from moeopt.measure.bench import BenchFacts
from moeopt.measure.compile_queue import Compiler
from moeopt.measure.cuda_bench import CudaBench, measured_rates
from moeopt.measure.monitor import GpuMonitor, gpu_count
from moeopt.measure.rates import Rates, RateStore, rate_key
from moeopt.measure.roofline import roofline_us
from moeopt.measure.supervisor import Deadlines, Supervisor
from moeopt.measure.worker_device import WorkerDevice

if TYPE_CHECKING:
    from moeopt.measure.options import DeviceOptions

log = logging.getLogger(__name__)

# Limits that decide what is legal: where the table and the driver differ, the run must not go on.
_LIMITS = (
    "name", "compute_capability", "shared_memory_per_block_optin", "registers_per_multiprocessor",
    "warps_per_multiprocessor",
)  # fmt: skip


class CudaDevice(WorkerDevice):
    """One CUDA GPU: its worker process, and the compile pool that feeds it.

    The parent never opens a CUDA context. The worker imports torch, takes the GPU and makes the
    operands while the parent and the compile processes are still starting.
    """

    def __init__(
        self,
        shape: MoEShape,
        index: int,
        options: DeviceOptions,
        *,
        batch_sizes: Sequence[int] | None = None,
        pool: Compiler | None = None,
        make_pool: Callable[[MoEShape, GpuSpec, MoEKernel, DeviceOptions], Compiler] | None = None,
        rates: RateStore | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.index = index
        self.options = options
        planned = choose_batch_sizes(batch_sizes)
        monitor = GpuMonitor.open(index)
        environment = {"TRITON_CACHE_DIR": str(options.compile_cache)} if options.compile_cache else {}
        # Not imported here: the worker finds its kernel by itself, at the same time.
        make_kernel = functools.partial(_kernel, options.kernel, options.engine)
        bench = CudaBench(make_kernel, shape, index, options.routing, planned, options.seed, options.warm_l2)
        supervisor = Supervisor(bench, log_path(index), deadlines=deadlines, environment=environment)
        supervisor.prepare([Cell(role, m) for m in planned for role in ROLES])
        try:
            supervisor.start()
            gpu = _spec(monitor) or _detected(supervisor.facts())
            kernel = make_kernel()
            kernel.check(shape, gpu)
            if pool is None:
                pool = (make_pool or local_pool)(shape, gpu, kernel, options)
            provenance = _provenance(gpu, index, kernel, monitor, options)
        except BaseException:
            supervisor.close()
            if pool is not None:
                pool.close()
            raise
        self.pool = pool
        self._rate_store = rates or RateStore()
        self._rates: Rates | None = None
        spec = DeviceSpec.of_kernel(kernel, shape, gpu, provenance)
        super().__init__(
            spec=replace(spec, roofline_us=self._roofline_us, routing=options.routing, seed=options.seed),
            kernel=kernel,
            supervisor=supervisor,
            compiler=pool,
            batch_sizes=planned,
            monitor=monitor,
            wait_idle=options.wait_idle,
        )

    @property
    def worker_facts(self) -> BenchFacts:
        """What the worker says of the GPU and of how it times; waits until it is up."""
        return self._ensure_worker()

    def rates(self) -> Rates:
        """Measured copy bandwidth and matmul rate: from the user's cache, or measured now.

        They are kept, unless another process used the GPU meanwhile.

        Raises:
            DeviceError: They are not known yet and a measurement is under way.
        """
        if self._rates is None:
            key = rate_key(self.spec.gpu.name, self.spec.provenance.driver, self.spec.provenance.torch, self.spec.shape)
            self._rates = self._rate_store.load(key)
            if self._rates is None:
                self._rates = self._ask(measured_rates)
                self._poll(force=True)
                if self._busy is None:
                    self._rate_store.save(key, self._rates)
                else:
                    log.warning("the GPU's rates are measured again next time: %s meanwhile", self._busy)
        return self._rates

    def _roofline_us(self, cell: Cell) -> float | None:
        if self._rates is None and self._measuring:
            return None
        return roofline_us(self.spec.shape, cell, self.rates(), self.options.routing, self.options.seed)

    def _ensure_worker(self) -> BenchFacts:
        facts = super()._ensure_worker()
        for limit in _LIMITS:
            found, expected = (getattr(gpu, limit) for gpu in (_detected(facts), self.spec.gpu))
            if found != expected:
                raise DeviceError(
                    f"cuda:{self.index} has {limit} {found!r} and {expected!r} was expected: "
                    "set CUDA_DEVICE_ORDER=PCI_BUS_ID if several kinds of GPU are in this machine"
                )
        return facts


def open_cuda(
    shape: MoEShape,
    indices: Sequence[int] | None,
    options: DeviceOptions,
    *,
    batch_sizes: Sequence[int] | None = None,
) -> Device:
    """Opens CUDA GPUs as one device.

    Args:
        shape: The layer.
        indices: torch's indices, or None for all visible GPUs.
        options: How they are used.
        batch_sizes: What will be timed.

    Raises:
        DeviceError: There is no such GPU, it has too little memory, or the GPUs differ.
    """
    if indices is None:
        indices = range(_visible_gpus())
    if not indices:
        raise DeviceError("no CUDA GPU was found: use a GPU machine, or replay a recording with --gpu recorded:FILE")
    if len(indices) == 1:
        return CudaDevice(shape, indices[0], options, batch_sizes=batch_sizes)
    from moeopt.measure.multi_gpu import MultiGpuDevice

    devices: list[CudaDevice] = []
    try:
        for index in indices:
            pool = devices[0].pool if devices else None
            devices.append(CudaDevice(shape, index, options, batch_sizes=batch_sizes, pool=pool))
        return MultiGpuDevice(devices)
    except BaseException:
        for device in devices:
            device.close()
        raise


def local_pool(shape: MoEShape, gpu: GpuSpec, kernel: MoEKernel, options: DeviceOptions) -> CompilePool:
    """A started compile pool for the GPU."""
    pool = CompilePool(kernel, shape, gpu.compute_capability, workers=options.workers, cache_dir=options.compile_cache)
    pool.start()
    return pool


def log_path(index: int) -> Path:
    """Where the output of this process's worker on a GPU goes."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("moeopt")) / "logs" / f"{os.getpid()}-gpu{index}.log"


def _kernel(name: str, engine: str | None) -> MoEKernel:
    from moeopt.kernels import get_kernel

    return get_kernel(name, engine=engine)


def _spec(monitor: GpuMonitor | None) -> GpuSpec | None:
    """Limits from the table, by the name that the driver gives: seconds before torch could tell."""
    if monitor is None:
        return None
    try:
        spec = GpuSpec.by_name(monitor.name)
    except UnknownGpuError:
        return None
    return spec if spec.name == monitor.name else None


def _detected(facts: BenchFacts) -> GpuSpec:
    assert facts.gpu is not None  # a CudaBench says it
    return facts.gpu


def _provenance(
    gpu: GpuSpec, index: int, kernel: MoEKernel, monitor: GpuMonitor | None, options: DeviceOptions
) -> Provenance:
    from moeopt.kernels.routing import Routing

    key = kernel.key
    return Provenance(
        source=f"measured on {gpu.name} (cuda:{index}) with the {key.name} kernel",
        kernel=key.name,
        kernel_version=key.version,
        kernel_hash=key.source_hash,
        triton=importlib.metadata.version("triton"),
        torch=importlib.metadata.version("torch"),
        driver=monitor.driver if monitor is not None else "",
        routing=Routing.parse(options.routing).key,
        warm_l2=options.warm_l2,
    )


def _visible_gpus() -> int:
    count = gpu_count()
    if count is None:
        import torch

        count = int(torch.cuda.device_count())
    return count
