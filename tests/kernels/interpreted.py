"""An engine's kernel on the CPU through Triton's interpreter, in a process of its own (``engine_checks.py``).

Triton decides at import whether kernels are interpreted.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.kernels.base import MoEKernel
from moeopt.kernels.sglang import SglangKernel
from moeopt.kernels.vllm import VllmKernel
from moeopt.testing.suites import KernelTestCase
from tests.kernels.engine_cases import CASES

ENGINE, PATH, NAMES = (os.environ[f"MOEOPT_INTERPRETED_{name}"] for name in ("ENGINE", "PATH", "CASES"))


def mend_interpreter() -> None:
    """Triton 3.6's interpreter multiplies and makes bfloat16 as if its bits were integers."""
    builder = interpreter.InterpreterBuilder
    dot, cast, patch = builder.create_dot, builder.cast_impl, interpreter._patch_lang_tensor

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def integer_to_float(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16:
            source = interpreter.TensorHandle(source.data.astype(np.float32), tl.float32)
        return cast(self, source, target)

    def index(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    builder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    builder.create_si_to_fp = integer_to_float
    builder.create_ui_to_fp = integer_to_float
    interpreter._patch_lang_tensor = index


mend_interpreter()


class TestInterpreted(KernelTestCase):
    @pytest.fixture
    def make_kernel(self) -> Callable[[], MoEKernel]:
        return functools.partial({"sglang": SglangKernel, "vllm": VllmKernel}[ENGINE], PATH)

    @pytest.fixture(params=NAMES.split(","))
    def shapes(self, request: pytest.FixtureRequest) -> list[MoEShape]:
        return [CASES[request.param]]

    @pytest.fixture
    def configs(self) -> list[LaunchConfig]:
        return [LaunchConfig(16, block_n, 32, 2, 4, 3, use_tma=tma) for block_n in (32, 64) for tma in (False, True)]

    @pytest.fixture
    def device(self) -> str:
        return "cpu"
