"""Code paths: which instruction of the tensor cores a tile gets, and what its pipeline holds in shared memory.

These are Triton's rules, for a value of each launch parameter or for arrays over many configs.
"""

from __future__ import annotations

from typing import Any, Final, Generic, NamedTuple, TypeVar

from numpy.typing import NDArray

from moeopt.core.architecture import Architecture
from moeopt.core.dtypes import DTypeSpec

# One value, or an array over configs; what is or is not, as 1 and 0.
Number = TypeVar("Number", int, NDArray[Any])

# Rows of one instruction of wgmma and tcgen05, and the warps that issue it together.
_ROWS: Final = 64
_WARPS: Final = 4


class CodePath(NamedTuple, Generic[Number]):
    """How a tile is multiplied: one value, or an array over configs.

    Attributes:
        from_shared: Whether the tensor cores read shared memory (wgmma, tcgen05), not registers (mma).
        swapped: Whether the transposed tile is computed: where it has too few rows for wgmma, the weights take that
            side. The builtin kernel, SGLang's and vLLM's do so for fp8 under the same conditions.
    """

    from_shared: Number
    swapped: Number


def code_path(
    architecture: Architecture, spec: DTypeSpec, block_m: Number, block_n: Number, num_warps: Number
) -> CodePath[Number]:
    """The path of a tile of BLOCK_SIZE_M x BLOCK_SIZE_N with so many warps.

    Args:
        architecture: Where it runs.
        spec: The scheme. Triton has no tcgen05 for int8.
        block_m: BLOCK_SIZE_M.
        block_n: BLOCK_SIZE_N.
        num_warps: Warps of a program.
    """
    served = architecture.instruction != "mma" and (architecture.instruction, spec.compute) != ("tcgen05", "int8")
    swaps = architecture.instruction == "wgmma" and spec.compute == "fp8"
    swapped = (block_m < _ROWS) & (block_n >= _ROWS) & swaps
    return CodePath(((block_m >= _ROWS) | swapped) & (num_warps >= _WARPS) & served, swapped)


def pipeline_bytes(
    path: CodePath[Number], spec: DTypeSpec, block_m: Number, block_n: Number, block_k: Number, num_stages: Number
) -> Number:
    """Bytes of the software pipeline's buffers of A and B tiles.

    There are ``num_stages - 1`` buffers where the tensor cores read registers, and ``num_stages`` where they read
    shared memory; but for weights that are converted, which pass through registers in any case.

    Args:
        path: Of :func:`code_path`.
        spec: The scheme.
        block_m: BLOCK_SIZE_M.
        block_n: BLOCK_SIZE_N.
        block_k: BLOCK_SIZE_K.
        num_stages: Depth of the pipeline.
    """
    activations = block_m * block_k * spec.activation_bits // 8
    weights = block_n * block_k * spec.weight_bits // 8
    buffers = num_stages - 1 + path.from_shared
    out: Number = buffers * activations + (num_stages - 1 if spec.weight_only else buffers) * weights
    return out


def converted_bytes(path: CodePath[Number], spec: DTypeSpec, block_n: Number, block_k: Number) -> Number:
    """Bytes of a tile of weights that were converted, and that the tensor cores read from shared memory; else 0."""
    out: Number = path.from_shared * spec.weight_only * block_n * block_k * spec.activation_bits // 8
    return out
