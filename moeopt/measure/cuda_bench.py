"""Bench of a CUDA GPU: operands, references, checked launches and rounds. Runs in the worker process."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Cell, Job
from moeopt.errors import MoeoptError
from moeopt.kernels.base import MoEKernel
from moeopt.kernels.memory import memory_needed
from moeopt.kernels.workset import WorkSet, make_workset
from moeopt.measure.bench import Bench, BenchCounts, BenchError, BenchFacts, Checked
from moeopt.measure.monitor import GpuMonitor, holders
from moeopt.measure.rates import Rates, measure_rates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from moeopt.kernels.layer import Layer, RoutedBatch
    from moeopt.measure.timer import GraphTimer

# A launch that takes longer than this needs no warm-up replay: the checked launch was one.
_LONG_LAUNCH_US: Final = 10_000.0
# After so long a pause the GPU is given work before the next timing, so that its clock is up.
_PAUSE_S: Final = 0.3
_WAKE_S: Final = 0.02
_FIRST_WAKE_S: Final = 0.3
# References are kept while all of them take no more than this share of what is free beyond the least.
_REFERENCE_SHARE: Final = 0.25


@dataclass
class _Workload:
    """Operands of one (role, batch size)."""

    role: Role
    workset: WorkSet
    batches: list[RoutedBatch]
    rows: int
    columns: int


@dataclass
class _Side:
    """One role of the job under way."""

    timer: GraphTimer
    launches: list[Callable[[], None]]
    launch_us: float
    captured: bool = False


@dataclass
class CudaBench(Bench):
    """Times a kernel on a GPU.

    Attributes:
        make_kernel: Makes what is timed. A function, so that the parent need not import it first.
        shape: The layer.
        index: torch's index of the GPU.
        routing: As :meth:`moeopt.kernels.routing.Routing.parse` reads it.
        batch_sizes: What will be asked for; decides how much memory is planned.
        seed: Of weights, activations and routings.
        warm_l2: Whether weights may stay in L2.
    """

    make_kernel: Callable[[], MoEKernel]
    shape: MoEShape
    index: int
    routing: str
    batch_sizes: tuple[int, ...]
    seed: int = 0
    warm_l2: bool = False
    counts: BenchCounts = field(default_factory=BenchCounts)

    def open(self) -> BenchFacts:
        import torch

        from moeopt.kernels.routing import Routing

        started = time.monotonic()
        monitor = GpuMonitor.open(self.index)
        self._torch: Any = torch
        self._kernel = self.make_kernel()
        launched = self._kernel.load(self.shape)
        self._routing = Routing.parse(self.routing)
        free = self._take_device()
        need = memory_needed(self.shape, self.batch_sizes, l2_bytes=0 if self.warm_l2 else self._gpu.l2_bytes)
        if need.least > free:
            if monitor is not None:
                monitor.learn_own(os.getpid())
            others = holders(monitor.others()) if monitor is not None else []
            raise BenchError("runtime", need.refusal(self._gpu.name, free, others))
        # Copies of the weights and further references only while half of what is left stays free.
        self._copies_allowed = 1 + int((free - need.least) / 2 / need.weights)
        self._reference_room = max(need.largest_reference, int((free - need.least) * _REFERENCE_SHARE))
        self._layers: list[Layer] = []
        self._layer(0)
        self._workloads: dict[tuple[Role, int], _Workload] = {}
        self._references: OrderedDict[tuple[Role, int], Tensor] = OrderedDict()
        self._room: Tensor | None = None
        self._sides: list[_Side] = []
        self._timers = [self._make_timer(), self._make_timer()]
        self._listen()
        self._wake(_FIRST_WAKE_S)
        return BenchFacts(
            gpu=self._gpu,
            kernel=launched,
            timing=self._timers[0].method,
            torch=torch.__version__,
            free_bytes=free,
            open_s=round(time.monotonic() - started, 3),
        )

    def _take_device(self) -> int:
        """Makes the GPU current; returns its free bytes."""
        torch = self._torch
        self._gpu = GpuSpec.detect(self.index)
        self._device = torch.device("cuda", self.index)
        torch.cuda.set_device(self._device)
        # The default stream cannot be captured.
        torch.cuda.set_stream(torch.cuda.Stream(self._device))
        torch.backends.cuda.matmul.allow_tf32 = False
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def _make_timer(self) -> GraphTimer:
        from moeopt.measure.timer import GraphTimer

        return GraphTimer()

    # -- operands -------------------------------------------------------------------------------

    def prepare(self, cell: Cell) -> None:
        for role in cell.roles:
            self._workload(role, cell.batch_size)
            self._reference(role, cell.batch_size)

    def _layer(self, number: int) -> Layer:
        from moeopt.kernels.layer import make_layer

        while len(self._layers) <= number:
            self._layers.append(
                make_layer(self.shape, device=self._device, seed=self.seed + 1_000_003 * len(self._layers))
            )
        return self._layers[number]

    def _workload(self, role: Role, batch_size: int) -> _Workload:
        found = self._workloads.get((role, batch_size))
        if found is not None:
            return found
        import torch

        from moeopt.kernels.layer import make_batch

        def draw(count: int) -> NDArray[np.int32]:
            return self._routing.draw(self.shape, batch_size, count, self.seed)

        l2 = 0 if self.warm_l2 else self._gpu.l2_bytes
        workset = make_workset(draw, self.shape, role, l2, copies_allowed=self._copies_allowed)
        batches: list[RoutedBatch] = []
        for number, ids in enumerate(workset.topk_ids):
            if self.warm_l2 and batches:
                batches.append(batches[0])
                continue
            layer = self._layer(number % workset.copies)
            batches.append(make_batch(layer, role, torch.from_numpy(ids), seed=self.seed + number))
        workload = _Workload(role, workset, batches, batches[0].num_pairs, self.shape.output_rows(role))
        self._workloads[role, batch_size] = workload
        return workload

    def _reference(self, role: Role, batch_size: int) -> Tensor:
        key = (role, batch_size)
        found = self._references.get(key)
        if found is None:
            from moeopt.kernels.reference import reference

            found = reference(self._layers[0], role, self._workload(role, batch_size).batches[0])
            kept = sum(t.nbytes for t in self._references.values())
            while self._references and kept + found.nbytes > self._reference_room:
                kept -= self._references.popitem(last=False)[1].nbytes
            self._references[key] = found
        self._references.move_to_end(key)
        return found

    def _output(self, number: int, workload: _Workload) -> Tensor:
        """An output of this size, out of one piece of memory that all jobs share."""
        from moeopt.kernels.quant import compute_dtype

        size = workload.rows * workload.columns
        if self._room is None or self._room.numel() < size:
            self._room = None
            self._room = self._torch.empty(size, dtype=compute_dtype(self.shape), device=self._device)
        return self._room[:size].view(workload.rows, workload.columns)

    # -- one job --------------------------------------------------------------------------------

    def check(self, job: Job) -> Checked:
        from moeopt.kernels.reference import poison, relative_error

        self._wake_after_pause()
        torch = self._torch
        worst, expected = 0.0, 0.0
        try:
            for number, role in enumerate(job.cell.roles):
                workload = self._workload(role, job.cell.batch_size)
                expect = self._reference(role, job.cell.batch_size)
                out = self._output(number, workload)
                launches = [
                    self._kernel.bind(self._layers[i % workload.workset.copies], role, batch, job.config, out)
                    for i, batch in enumerate(workload.batches)
                ]
                poison(out, workload.batches[0], skips_remote_experts=self._kernel.skips_remote_experts(self.shape))
                us = self._timers[number].time_once(launches[0])
                error = relative_error(out, expect)
                worst = error if not error <= worst else worst
                expected += 3 * us * len(launches) * 1e-6
                self.counts.gpu_s += us * 1e-6
                self._sides.append(_Side(self._timers[number], launches, us))
        except torch.OutOfMemoryError as error:
            self._sides.clear()
            torch.cuda.empty_cache()
            # torch goes on about its settings after what was asked for and what the GPU has.
            told = ". ".join(" ".join(str(error).split()).split(". ")[1:3])
            raise BenchError("runtime", f"out of GPU memory: {told}") from None
        except MoeoptError as error:
            raise BenchError("constraints", str(error)) from None
        except Exception as error:
            if type(error).__name__ == "OutOfResources":  # Triton's word for a launch that cannot fit
                raise BenchError("constraints", " ".join(str(error).split())) from None
            raise
        return Checked(worst, expected)

    def round(self) -> float:
        total = 0.0
        for side in self._sides:
            if not side.captured:
                side.timer.capture(side.launches)
                side.captured = True
                if side.launch_us < _LONG_LAUNCH_US:
                    side.timer.replay()
            us = side.timer.time()
            self.counts.gpu_s += us * len(side.launches) * 1e-6
            total += us
        self._last_work = time.monotonic()
        return total

    def finish(self) -> None:
        for side in self._sides:
            side.timer.drop()
        self._sides = []

    def alive(self) -> None:
        self._torch.cuda.synchronize(self._device)
        self._torch.zeros(1, device=self._device).item()

    # -- around it ------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Counts what Triton compiles in this process: nothing, if the compile pool did its work."""
        import triton

        def listen(*, cache_hit: bool, **_: Any) -> None:
            if cache_hit:
                self.counts.loaded += 1
            else:
                self.counts.compiled += 1

        triton.knobs.compilation.listener = listen

    def _wake_after_pause(self) -> None:
        if time.monotonic() - self._last_work > _PAUSE_S:
            self._wake(_WAKE_S)

    def _wake(self, seconds: float) -> None:
        """Keeps the GPU busy for a moment, so that its clock goes up."""
        torch = self._torch
        a = torch.randn(2048, 2048, dtype=torch.float16, device=self._device)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                torch.mm(a, a)
            torch.cuda.current_stream().synchronize()
        self._last_work = time.monotonic()


def measured_rates(bench: CudaBench) -> Rates:
    """Bandwidths and matmul rate of a bench's GPU: what a worker may be asked for."""
    return measure_rates(bench._device, bench.shape)
