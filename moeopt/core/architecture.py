"""GPU architectures: what GPUs of one compute capability have in common, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Instruction = Literal["mma", "wgmma", "tcgen05"]
Capability = tuple[int, int]

# Registers are allocated per warp in units of so many (CUDA occupancy rules, compute capability 8 and later).
REGISTER_ALLOCATION_UNIT: Final = 256
_FP8_SINCE: Final = (8, 9)
_HOPPER: Final = (9, 0)


@dataclass(frozen=True)
class Architecture:
    """What GPUs of one compute capability have in common.

    Attributes:
        max_blocks_per_sm: Resident blocks of a multiprocessor, at most (CUDA C++ programming guide, technical
            specifications).
        instruction: The tensor cores' fastest one, which large tiles get: ``mma`` reads registers, ``wgmma`` and
            ``tcgen05`` read shared memory. The others run as mma (:mod:`moeopt.core.code_path`).
        fp8: Whether the tensor cores multiply fp8.
        dependent_launch: Whether a kernel may start while the one before drains, and there is a tensor memory
            accelerator (TMA).
        mma_rate: Share of the data sheet's rate that mma has; less than 1 where the sheet counts another instruction.
        reserved_shared_bytes: Shared memory that the driver keeps for itself in every block.
        shared_kib: KiB of shared memory that a block may ask for and that a multiprocessor has; None if unknown.
        warps: Resident warps of a multiprocessor, at most; None if unknown.
    """

    max_blocks_per_sm: int = 32
    instruction: Instruction = "mma"
    fp8: bool = True
    dependent_launch: bool = True
    mma_rate: float = 1.0
    reserved_shared_bytes: int = 1024
    shared_kib: tuple[int, int] | None = None
    warps: int | None = None


ARCHITECTURES: Final[dict[Capability, Architecture]] = {
    (8, 0): Architecture(32, fp8=False, dependent_launch=False, shared_kib=(163, 164), warps=64),
    (8, 6): Architecture(16, fp8=False, dependent_launch=False, shared_kib=(99, 100), warps=48),
    (8, 7): Architecture(16, fp8=False, dependent_launch=False, shared_kib=(163, 164), warps=48),
    (8, 9): Architecture(24, dependent_launch=False, shared_kib=(99, 100), warps=48),
    (9, 0): Architecture(32, "wgmma", mma_rate=0.62, shared_kib=(227, 228), warps=64),
    (10, 0): Architecture(32, "tcgen05", shared_kib=(227, 228), warps=64),
    (10, 3): Architecture(32, "tcgen05", shared_kib=(227, 228), warps=64),
    (12, 0): Architecture(24, shared_kib=(99, 100), warps=48),
    (12, 1): Architecture(24, shared_kib=(99, 100), warps=48),
}


def architecture_of(capability: Capability) -> Architecture:
    """The row of a compute capability; where there is none, that of the last minor version before it.

    An unknown major version is taken to run mma, and to have what those before it have.
    """
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    known = [row for row in ARCHITECTURES if row[0] == capability[0] and row <= capability]
    if known:
        return ARCHITECTURES[max(known)]
    return Architecture(fp8=capability >= _FP8_SINCE, dependent_launch=capability >= _HOPPER)
