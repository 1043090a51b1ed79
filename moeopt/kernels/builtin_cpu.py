"""Running a Triton kernel on CPU tensors, through Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

# What the interpreter replaces while it runs.
_LANGUAGE: Final = (tl, tl.core, tl.math, tl.tensor, tl.core.dtype, tl.core.tensor_descriptor_base)


class CpuKernel:
    """A kernel for CPU tensors, launched like any other: ``CpuKernel(fn)[grid](...)``.

    It works in a process where Triton also compiles, as long as the kernel calls no function that is
    itself defined with ``triton.jit`` (such as ``tl.cdiv`` and ``tl.zeros``).

    Args:
        fn: The plain Python function of the kernel (``JITFunction.fn``).
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._function = interpreter.InterpretedFunction(fn)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """A launch that runs every program of the grid, one after the other."""
        return functools.partial(self._run, grid)

    def _run(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        builder = interpreter.interpreter_builder
        patch_tensor, dot = interpreter._patch_lang_tensor, builder.create_dot

        def patch(tensor: Any, *scope: Any) -> None:
            patch_tensor(tensor, *scope)
            # Before Triton 3.9 the interpreter calls int() on an array of one element: numpy 2.4 refuses.
            tensor.__index__ = lambda self: int(self.handle.data.item())

        def dot_of_values(a: Any, b: Any, *rest: Any) -> Any:
            return dot(_values(a), _values(b), *rest)

        language = [(owner, dict(vars(owner))) for owner in _LANGUAGE]
        interpreter._patch_lang_tensor, builder.create_dot = patch, dot_of_values
        try:
            self._function[grid](*args, **kwargs)
        finally:
            interpreter._patch_lang_tensor = patch_tensor
            del builder.create_dot
            _restore(language)


def _restore(language: list[tuple[Any, dict[str, Any]]]) -> None:
    """Undoes what the interpreter put into Triton's language: version 3.5 leaves it there."""
    for owner, before in language:
        for name, value in list(vars(owner).items()):
            if name not in before:
                delattr(owner, name)
            elif value is not before[name]:
                setattr(owner, name, before[name])


def _values(handle: Any) -> Any:
    """A bfloat16 operand as float32: the interpreter keeps bit patterns, and multiplies those."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
