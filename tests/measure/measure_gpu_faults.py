"""What the worker imports in the tests on a GPU: a kernel that misbehaves on chosen configs, and a question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.kernels.workset import WorkSet
from moeopt.measure.cuda_bench import CudaBench

Kind = Literal["fault", "hang", "memory", "wrong", "crash"]
# Two minutes at 2 GHz: far beyond any deadline, and it ends by itself should nobody end it.
_HANG_CYCLES = 240_000_000_000


class FaultingKernel(BuiltinKernel):
    """The builtin kernel, but for some configs."""

    def __init__(self, faulty: Mapping[LaunchConfig, Kind]) -> None:
        self.faulty = dict(faulty)

    def bind(self, layer: Any, role: Any, batch: Any, config: LaunchConfig, out: Any) -> Callable[[], None]:
        kind = self.faulty.get(config)
        launch = super().bind(layer, role, batch, config, out)
        if kind is None:
            return launch
        import torch

        far = torch.tensor([1 << 40], device=out.device)

        def misbehave() -> None:
            if kind == "fault":
                # torch stops such a kernel with a device-side assertion, and that sticks.
                torch.take(out.view(-1), far)
            elif kind == "hang":
                torch.cuda._sleep(_HANG_CYCLES)
            elif kind == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device=out.device)
            elif kind == "crash":
                import os
                import signal

                os.kill(os.getpid(), signal.SIGSEGV)
            else:
                launch()
                out[-1] *= -1

        return misbehave


def worksets(bench: CudaBench) -> dict[tuple[Role, int], WorkSet]:
    """What the launches of each (role, batch size) so far work on."""
    return {key: workload.workset for key, workload in bench._workloads.items()}
