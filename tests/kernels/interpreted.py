"""Runs an engine's kernel on the CPU through Triton's interpreter: ``python interpreted.py ENGINE PATH CASE...``.

Prints one JSON object: for each case and role, the relative error against the reference. Triton
decides at import whether kernels are interpreted, so this is a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.reference import poison, reference, relative_error
from moeopt.kernels.sglang import SglangKernel
from moeopt.kernels.vllm import VllmKernel
from tests.kernels.engine_cases import CASES

TOKENS = 3


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


def main() -> None:
    engine, path, *names = sys.argv[1:]
    mend_interpreter()
    kernel = {"sglang": SglangKernel, "vllm": VllmKernel}[engine](path)
    errors: dict[str, float] = {}
    for name in names:
        shape = CASES[name]
        layer = make_layer(shape, device="cpu", seed=1)
        generator = torch.Generator().manual_seed(2)
        experts = shape.num_experts * shape.ep_size
        ids = torch.stack([torch.randperm(experts, generator=generator)[: shape.top_k] for _ in range(TOKENS)])
        ids[ids >= shape.num_experts] = -1
        for role in ROLES:
            batch = make_batch(layer, role, ids, seed=3)
            expected = reference(layer, role, batch)
            for tma in (False, True) if kernel.can_use_tma(shape, role) else (False,):
                config = LaunchConfig(16, 64 if not shape.block_shape else 32, 32, 2, 4, 3, use_tma=tma)
                out = torch.empty(expected.shape, dtype=torch.float16 if name == "fp16" else torch.bfloat16)
                poison(out, batch, skips_remote_experts=kernel.skips_remote_experts(shape))
                kernel.bind(layer, role, batch, config, out)()
                errors[f"{name} {role}{' tma' * tma}"] = relative_error(out, expected)
    sys.stdout.write(json.dumps(errors) + "\n")


if __name__ == "__main__":
    main()
