"""One launch of an engine's kernel, as the engine itself makes it.

The engine's own launching function is called, with its kernel replaced by a recorder: what it passes
(arguments, constants, grid, launch options) is kept instead of launched. So every rule of its launch
path holds here without being written down twice. With tensors of the ``meta`` device the same launch
compiles without a GPU and without memory.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.errors import UnsupportedShapeError
from moeopt.kernels.layer import Layer, RoutedBatch
from moeopt.kernels.quant import (
    Weights,
    activation_dtype,
    activation_scale_shape,
    compute_dtype,
    stored_reduction,
    weight_dtype,
    weight_scale_dtype,
    weight_scale_shape,
)

# What every fused MoE kernel that can be tuned with an engine's config file has to take.
CORE_ARGUMENTS: Final = (
    "a_ptr", "b_ptr", "c_ptr", "topk_weights_ptr", "sorted_token_ids_ptr", "expert_ids_ptr",
    "num_tokens_post_padded_ptr", "N", "K", "EM", "num_valid_tokens", "BLOCK_SIZE_M", "BLOCK_SIZE_N",
    "BLOCK_SIZE_K", "GROUP_SIZE_M", "MUL_ROUTED_WEIGHT", "top_k", "compute_type",
)  # fmt: skip
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch.

    Attributes:
        kernel: The Triton kernel.
        grid: Programs along each axis.
        args: Positional arguments.
        kwargs: Constants and launch options.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self) -> None:
        """Launches on the current stream."""
        self.kernel[self.grid](*self.args, **self.kwargs)

    def warmup(self) -> Any:
        """Compiles for the active driver's target and returns Triton's compiled kernel."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.kwargs)

    def named(self) -> dict[str, Any]:
        """Arguments and options by name."""
        return {**dict(zip(self.kernel.arg_names, self.args, strict=False)), **self.kwargs}

    def specialisation(self) -> str:
        """Names the binary: equal for launches that Triton compiles to one, whatever the pointers hold."""
        constants = {p.name for p in self.kernel.params if p.is_constexpr}
        runtime = set(self.kernel.arg_names) - constants
        parts = [f"{n}={_trait(v) if n in runtime else v!r}" for n, v in sorted(self.named().items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _trait(value: Any) -> str:
    """What Triton specialises on: a pointer's type; whether an integer is 1, divisible by 16, or long."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, int) and not isinstance(value, bool):
        return "1" if value == 1 else f"int{64 if value > _INT32_MAX else 32}{'/16' if value % 16 == 0 else ''}"
    base, block = getattr(value, "base", None), getattr(value, "block_shape", None)
    return f"descriptor {base.dtype} {list(block or ())}" if isinstance(base, torch.Tensor) else repr(value)


class Recorder:
    """Stands where the engine's launching function looks for its kernel."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            launch = Launch(self._kernel, (), args, kwargs)
            cells = grid(launch.named()) if callable(grid) else grid
            self._launches.append(Launch(self._kernel, tuple(cells), args, kwargs))

        return record


def call_by_name(function: Callable[..., Any], values: Mapping[str, Any], what: str) -> None:
    """Calls an engine's function with those of the values that it takes.

    Args:
        function: The engine's launching function.
        values: By parameter name, all that can be given.
        what: Engine and file, for the message.

    Raises:
        UnsupportedShapeError: The function needs a parameter that is not among the values.
    """
    parameters = inspect.signature(function).parameters
    unknown = [n for n, p in parameters.items() if n not in values and p.default is inspect.Parameter.empty]
    if unknown:
        raise UnsupportedShapeError(
            f"{function.__name__} of {what} needs {', '.join(unknown)}, which moeopt does not know: expected among "
            f"{', '.join(values)}; use an engine version that moeopt is tested with, or kernel 'builtin'"
        )
    function(**{n: values[n] for n in parameters if n in values})


def check_arguments(kernel: Any, what: str) -> None:
    """Whether a kernel takes the arguments of the fused MoE kernel that is known.

    Raises:
        UnsupportedShapeError: It does not; the message names what was expected.
    """
    names = tuple(getattr(kernel, "arg_names", ()))
    missing = [n for n in CORE_ARGUMENTS if n not in names]
    if missing:
        raise UnsupportedShapeError(
            f"the fused MoE kernel of {what} has an unknown signature: expected the arguments "
            f"{', '.join(CORE_ARGUMENTS)}, and {', '.join(missing)} is missing; use an engine version that moeopt is "
            "tested with, or kernel 'builtin'"
        )


def meta_operands(shape: MoEShape, role: Role, batch_size: int) -> tuple[Layer, RoutedBatch, torch.Tensor]:
    """Layer, batch and output [M * top_k, rows] without memory: shapes, strides and dtypes only."""

    def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def weights(of: Role) -> Weights:
        scale = weight_scale_shape(shape, of)
        return Weights(
            empty((shape.num_experts, shape.output_rows(of), stored_reduction(shape, of)), weight_dtype(shape)),
            None if scale is None else empty(scale, weight_scale_dtype(shape)),
        )

    pairs = batch_size * shape.top_k
    tokens = batch_size if role == "up" else pairs
    a_scale = activation_scale_shape(shape, role, tokens)
    up, down = (weights(r) for r in ROLES)
    batch = RoutedBatch(
        role=role,
        topk_ids=empty((batch_size, shape.top_k), torch.int32),
        topk_weights=empty((batch_size, shape.top_k), torch.float32),
        a=empty((tokens, shape.reduction(role)), activation_dtype(shape)),
        a_scale=None if a_scale is None else empty(a_scale, torch.float32),
    )
    return Layer(shape, up, down), batch, empty((pairs, shape.output_rows(role)), compute_dtype(shape))
