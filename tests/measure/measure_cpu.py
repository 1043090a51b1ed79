"""The GPU's bench without the GPU: Triton's interpreter launches, a stand-in for CUDA graphs times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.kernels.reference import reference
from moeopt.measure.cuda_bench import CudaBench


class CpuTimer:
    """Runs what was captured, by the host's clock."""

    method = "host clock"

    def __init__(self) -> None:
        self.captured: list[Callable[[], None]] = []
        self.replays = 0

    def capture(self, launches: Sequence[Callable[[], None]]) -> None:
        self.captured = list(launches)

    def replay(self) -> None:
        self.replays += 1
        for launch in self.captured:
            launch()

    def time(self) -> float:
        start = time.perf_counter()
        self.replay()
        return (time.perf_counter() - start) * 1e6 / len(self.captured)

    def time_once(self, launch: Callable[[], None]) -> float:
        start = time.perf_counter()
        launch()
        return (time.perf_counter() - start) * 1e6

    def drop(self) -> None:
        self.captured = []


class QuickKernel(BuiltinKernel):
    """Compiles like the builtin kernel; a launch copies the reference, which is quicker than the interpreter."""

    def bind(self, layer: Any, role: Any, batch: Any, config: LaunchConfig, out: Any) -> Callable[[], None]:
        exact = reference(layer, role, batch)
        return lambda: out.copy_(exact)


@dataclass
class CpuBench(CudaBench):
    """A CudaBench on the CPU."""

    free: int = 1 << 40
    l2_bytes: int = 1 << 16
    quick: bool = False

    def _take_device(self) -> int:
        import dataclasses

        self._gpu = dataclasses.replace(GpuSpec.by_name("NVIDIA H200"), l2_bytes=self.l2_bytes)
        self._device = self._torch.device("cpu")
        if self.quick:
            self._kernel = QuickKernel()
        return self.free

    def _make_timer(self) -> Any:
        return CpuTimer()

    def _wake(self, seconds: float) -> None:
        self._last_work = time.monotonic()

    def alive(self) -> None:
        return
