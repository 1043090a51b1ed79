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
import torch
import triton.language as tl
from triton.runtime import interpreter

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.trial import MAX_RELATIVE_ERROR
from moeopt.kernels.base import MoEKernel
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.quant import compute_dtype
from moeopt.kernels.reference import poison, reference, relative_error
from moeopt.kernels.sglang import SglangKernel
from moeopt.kernels.vllm import VllmKernel
from moeopt.testing.suites import KernelTestCase
from tests.kernels.engine_cases import CASES

_TOKENS = 3
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

    def test_results_with_tma_are_as_exact(self, kernel: MoEKernel, shapes: list[MoEShape], device: str) -> None:
        """No result is the reference itself, and loads by TMA round alike."""
        (shape,) = shapes
        layer = make_layer(shape, device=device, seed=1)
        generator = torch.Generator().manual_seed(2)
        experts = shape.num_experts * shape.ep_size
        ids = torch.stack([torch.randperm(experts, generator=generator)[: shape.top_k] for _ in range(_TOKENS)])
        ids[ids >= shape.num_experts] = -1
        for role in ROLES:
            batch = make_batch(layer, role, ids, seed=3)
            expected, errors = reference(layer, role, batch), []
            for tma in (False, True) if kernel.can_use_tma(shape, role) else (False,):
                config = LaunchConfig(16, 64 if not shape.block_shape else 32, 32, 2, 4, 3, use_tma=tma)
                out = torch.empty(expected.shape, dtype=compute_dtype(shape))
                poison(out, batch, skips_remote_experts=kernel.skips_remote_experts(shape))
                kernel.bind(layer, role, batch, config, out)()
                errors.append(relative_error(out, expected))
                assert 0 < errors[-1] < MAX_RELATIVE_ERROR, (role, config)
            assert errors[-1] == pytest.approx(errors[0], rel=0.1)
