"""Occupancy of a multiprocessor by a compiled config."""

from __future__ import annotations

from dataclasses import dataclass

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import blocks_per_multiprocessor
from moeopt.core.trial import Resources


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
    registers = max(resources.registers, 1)
    limits = blocks_per_multiprocessor(gpu, resources.shared_bytes, registers, config.num_warps)
    limited_by = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limited_by], limited_by)
