"""A kernel that misbehaves on chosen configs, for the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from moeopt.core.config import LaunchConfig
from moeopt.kernels.builtin import BuiltinKernel

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
