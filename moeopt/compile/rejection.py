"""Which compiled configs are not worth a launch."""

from __future__ import annotations

from typing import Final

from moeopt.gpu import GpuSpec
from moeopt.measure.base import Failure, Resources

# Of 2,532 configs measured on an H200 (bf16 and block fp8, 24 cells), no config with any local
# memory came within 19 % of its cell's best, the least of them with 24 bytes. A few bytes are let
# pass, because maxnreg trades them for occupancy in the wide space.
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
