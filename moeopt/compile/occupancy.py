"""Occupancy of a multiprocessor by a compiled config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.trial import Resources

# The driver keeps 1 KiB of shared memory for itself in every block, and hands out registers by the
# warp in lots of 256 (CUDA occupancy rules, compute capability 8 and later).
_RESERVED_SHARED_BYTES: Final = 1024


_REGISTER_LOT: Final = 256


# Most resident blocks of a multiprocessor (CUDA C++ programming guide, technical specifications).
_MOST_BLOCKS: Final = {80: 32, 86: 16, 87: 16, 89: 24, 90: 32, 100: 32, 103: 32, 120: 24, 121: 24}


_MOST_BLOCKS_ELSEWHERE: Final = 32


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many blocks a multiprocessor runs at a time.

    Attributes:
        blocks: Resident blocks; 0 where even one does not fit.
        limited_by: ``shared memory``, ``registers``, ``warps`` or ``blocks``: what would have to shrink for more.
    """

    blocks: int
    limited_by: str


def occupancy(resources: Resources, config: LaunchConfig, gpu: GpuSpec) -> Occupancy:
    """Blocks per multiprocessor of a compiled config, and what limits it.

    Args:
        resources: What the compiler said.
        config: Its number of warps is used.
        gpu: The GPU it would run on.
    """
    per_warp = -(-resources.registers * 32 // _REGISTER_LOT) * _REGISTER_LOT
    limits = {
        "shared memory": gpu.shared_memory_per_multiprocessor // (resources.shared_bytes + _RESERVED_SHARED_BYTES),
        "registers": gpu.registers_per_multiprocessor // max(per_warp, 1) // config.num_warps,
        "warps": gpu.warps_per_multiprocessor // config.num_warps,
        "blocks": _MOST_BLOCKS.get(gpu.sm, _MOST_BLOCKS_ELSEWHERE),
    }
    limited_by = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limited_by], limited_by)
