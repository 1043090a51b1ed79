"""Rejection of compiled configs that are not worth a launch."""

from __future__ import annotations

from typing import Final

from moeopt.core.gpu import GpuSpec
from moeopt.core.trial import Failure, Resources

# Two landscapes were measured on an H200 without this rule (bf16 and block fp8, 2,532 configs, 24 cells): 308
# configs used local memory, and none of them came within 19 % of its cell's best. A few bytes are let
# pass: with int8 such a config was within 4 %, and maxnreg trades them for occupancy in the wide space.
SPILL_LIMIT_BYTES: Final = 64


def rejection(resources: Resources, gpu: GpuSpec) -> Failure | None:
    """Why a compiled config is not launched, or None.

    Args:
        resources: What the compiler said.
        gpu: The GPU that it would run on.
    """
    if resources.shared_bytes > gpu.shared_memory_per_block_optin:
        return Failure(
            "constraints",
            f"needs {resources.shared_bytes:,} bytes of shared memory as compiled, "
            f"{gpu.name} has {gpu.shared_memory_per_block_optin:,} per block",
        )
    if resources.spills > SPILL_LIMIT_BYTES:
        return Failure(
            "constraints",
            f"keeps {resources.spills:,} bytes per thread in local memory, over the limit of {SPILL_LIMIT_BYTES}",
        )
    return None
