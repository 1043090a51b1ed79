"""A coarse estimate of a launch's time from first principles, with nothing fitted.

What a search may expect before it has seen a single time. Unlike :mod:`moeopt.costmodel`, whose
coefficients are fitted on recordings, it can be used where a recording is replayed to judge a search:
it cannot have learned the answer. All constants are round numbers of their kind (a latency, a share of
a peak rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.costmodel import expected_tiles
from moeopt.gpu import GpuSpec
from moeopt.measure.base import Cell
from moeopt.resources import shared_bytes
from moeopt.shape import DTYPES, MoEShape, Role
from moeopt.space import LaunchConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_LATENCY_US: Final = 0.8  # from asking for a tile to having it
_STEP_US: Final = 0.12  # issuing one loop step with 4 warps
_PROGRAM_US: Final = 1.5  # start and end of one program
_L2_BYTES_PER_US: Final = 40e3  # per multiprocessor
_DRAM_SHARE: Final = 0.85  # of the data sheet's bandwidth
_TENSOR_SHARE: Final = 0.75  # of the data sheet's rate
_TENSOR_SHARE_NARROW: Final = 0.4  # below 64 rows on a GPU made for 64
_TFLOPS_UNKNOWN: Final = 100.0
# What the tensor cores wait for: per weight that is dequantised, and per output and step with block-wise scales.
_DEQUANTISE: Final = 4.0
_RESCALE: Final = 2.0
_OPERATIONS_PER_US: Final = 128 * 1.7e3  # of one multiprocessor: 128 lanes at 1.7 GHz
_OTHER_REGISTERS: Final = 40.0
_REGISTERS: Final = 255.0
_SPILL: Final = 1 / 48  # how much slower per register over what there is


def formula_us(shape: MoEShape, gpu: GpuSpec, cells: Sequence[Cell], table: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimated microseconds of one launch, float64 [cells, configs]; in joint mode of both.

    Args:
        shape: The layer.
        gpu: Its limits and data-sheet rates.
        cells: Roles and batch sizes.
        table: Of :func:`moeopt.search.features.config_table`.
    """
    tile = _Tile(shape, gpu, table)
    return np.array(
        [np.sum([_cell_us(shape, gpu, tile, role, c.batch_size) for role in c.roles], axis=0) for c in cells]
    )


class _Tile:
    """What does not depend on the cell: arrays over configs."""

    def __init__(self, shape: MoEShape, gpu: GpuSpec, table: NDArray[np.int64]) -> None:
        spec = DTYPES[shape.dtype]
        self.a_bytes, self.w_bytes = spec.activation_bits / 8, spec.weight_bits / 8
        self.bm, self.bn, self.bk, _, warps, stages, maxnreg, _ = table.T.astype(np.float64)
        self.blocks, self.block = np.unique(self.bm, return_inverse=True)
        wide_mma = gpu.compute_capability[0] in (9, 10)
        from_shared = wide_mma & (self.bm >= 64)
        self.buffers = np.where(from_shared, stages, stages - 1)
        self.step_bytes = (self.bm * self.a_bytes + self.bn * self.w_bytes) * self.bk
        shared = np.maximum(_shared_bytes(shape, gpu, table), 1024.0)

        # Block-wise scales need a second set of accumulators.
        accumulators = self.bm * self.bn / (warps * 32) * (2 if shape.block_shape else 1)
        fragments = np.where(from_shared, 0.0, (self.bm + self.bn) * self.bk * self.w_bytes / (warps * 128))
        limit = np.where(maxnreg > 0, maxnreg, _REGISTERS)
        registers = np.clip(accumulators + fragments + _OTHER_REGISTERS, 32.0, limit)
        self.spill = 1 + np.maximum(accumulators + _OTHER_REGISTERS - limit, 0.0) * _SPILL
        self.occupancy = np.maximum(
            1.0,
            np.minimum.reduce(
                [
                    np.floor(gpu.shared_memory_per_multiprocessor / (shared + 1024)),
                    np.floor(gpu.registers_per_multiprocessor / (registers * warps * 32)),
                    np.floor(gpu.warps_per_multiprocessor / warps),
                    np.full_like(warps, 16.0),
                ]
            ),
        )
        rates = {"fp8": gpu.fp8_tflops, "int8": gpu.int8_tops}
        tflops = rates.get(spec.compute, 0.0) or gpu.bf16_tflops or _TFLOPS_UNKNOWN
        share = np.where(from_shared | (not wide_mma), _TENSOR_SHARE, _TENSOR_SHARE_NARROW)
        self.flops_per_us = tflops * 1e6 / gpu.multiprocessors * share
        operations = np.zeros_like(warps)
        if self.w_bytes < self.a_bytes:
            operations += _DEQUANTISE * self.bn * self.bk
        if shape.block_shape:
            operations += _RESCALE * self.bm * self.bn
        self.plain_us = operations / _OPERATIONS_PER_US
        self.issue_us = _STEP_US * 4 / np.minimum(warps, 4.0)


def _shared_bytes(shape: MoEShape, gpu: GpuSpec, table: NDArray[np.int64]) -> Floats:
    tiles, where = np.unique(table[:, [0, 1, 2, 4, 5]], axis=0, return_inverse=True)
    each = [
        shared_bytes(LaunchConfig(m, n, k, 1, warps, stages), shape, "up", gpu)
        for m, n, k, warps, stages in tiles.tolist()
    ]
    return np.array(each, dtype=np.float64)[where]


def _cell_us(shape: MoEShape, gpu: GpuSpec, t: _Tile, role: Role, batch_size: int) -> Floats:
    rows, reduction = shape.output_rows(role), shape.reduction(role)
    tiles, active = zip(*(expected_tiles(shape, batch_size, int(b)) for b in t.blocks), strict=True)
    programs = np.array(tiles)[t.block] * np.ceil(rows / t.bn)
    steps = np.ceil(reduction / t.bk)

    # Programs that share a multiprocessor: the slowest of tensor cores, L2, latency and issue rate.
    resident = np.clip(np.ceil(programs / gpu.multiprocessors), 1.0, t.occupancy)
    together = np.maximum.reduce(
        [
            resident * steps * (2 * t.bm * t.bn * t.bk / t.flops_per_us + t.plain_us),
            resident * t.step_bytes * steps / _L2_BYTES_PER_US,
            steps * _LATENCY_US / np.maximum(t.buffers - 1, 1.0) + _PROGRAM_US,
            resident * steps * t.issue_us,
        ]
    )
    rounds = programs / (gpu.multiprocessors * resident)
    waves = np.where(rounds < 1, 1.0, rounds + 0.5 * (np.ceil(rounds) - rounds))
    body = waves * (together + _PROGRAM_US)
    dram = active[0] * rows * reduction * t.w_bytes / (max(gpu.bandwidth_gbps, 1.0) * 1e3 * _DRAM_SHARE)
    return np.asarray(np.maximum(body * t.spill, dram) + 0.15 * body)
