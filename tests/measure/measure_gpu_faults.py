"""A kernel that writes where it must not, for the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moeopt.kernels.builtin import BuiltinKernel
from moeopt.space import LaunchConfig


class FaultingKernel(BuiltinKernel):
    """The builtin kernel, but for one config, which reads far outside its output."""

    def __init__(self, faulty: LaunchConfig) -> None:
        self.faulty = faulty

    def bind(self, layer: Any, role: Any, batch: Any, config: LaunchConfig, out: Any) -> Callable[[], None]:
        if config != self.faulty:
            return super().bind(layer, role, batch, config, out)
        import torch

        far = torch.tensor([1 << 40], device=out.device)

        def fault() -> None:
            # torch stops such a kernel with a device-side assertion, and that sticks.
            torch.take(out.view(-1), far)

        return fault
