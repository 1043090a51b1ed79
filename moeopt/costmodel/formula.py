"""Formula for the time of a launch, from the launch config and a GPU's data sheet alone.

Bytes and FLOPs per tile, programs per multiprocessor (occupancy), waves over the multiprocessors, pipeline depth,
registers, DRAM and L2 traffic. The constants are round numbers of their kind, chosen on recordings of an H200; only the
registers of a thread are fitted, on binaries. Good for ranking the configs of one cell, not for promising a time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeopt.core.code_path import code_path, converted_bytes, pipeline_bytes
from moeopt.core.config import columns
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import blocks_per_multiprocessor
from moeopt.core.shape import MoEShape, Role
from moeopt.kernels.work import activation_bytes, expected_visits, output_bytes, routed_share

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class RegisterCounts:
    """Registers of one thread: fitted on 964 binaries of an H200, median error 6 registers.

    Those of weights in groups, which are converted in registers, on 3,091 binaries, median error 19 registers.

    Attributes:
        base: Of any kernel.
        per_sum: Per element of the accumulator that a thread holds.
        per_block_sum: Times as many more where each block has a scale, and partial sums of their own.
        per_copy: Per 16-byte load of a step.
        per_operand: Per element of A and B that mma.sync keeps in registers.
        grouped_base: As ``base``, for weights in groups: with mma.sync, with wgmma.
        grouped_per_sum: As ``per_sum``, for weights in groups.
        grouped_per_weight: Per weight that a thread converts in a step: with mma.sync, with wgmma.
        most: The architecture's limit.
    """

    base: float = 25.1
    per_sum: float = 1.063
    per_block_sum: float = 1.274
    per_copy: float = 2.90
    per_operand: float = 0.676
    grouped_base: tuple[float, float] = (46.0, 75.0)
    grouped_per_sum: float = 1.6
    grouped_per_weight: tuple[float, float] = (1.2, 0.7)
    most: int = 255


@dataclass(frozen=True)
class TensorCores:
    """Shares of the data sheet's rate that a launch reaches, and what else a step computes.

    Attributes:
        wgmma: Reading shared memory.
        swapped: Of that, where the transposed tile is computed.
        mma: Reading registers.
        mma_fp8: Of that with fp8 on Hopper, which converts it to 16 bits first.
        no_rate_tflops: TFLOP/s of a GPU whose data sheet has no rate.
        block_scale: µs per 1e5 elements of a tile for scaling the sums of a block.
        dequantise: µs per 1e5 weights for converting a group's.
        dequantise_wgmma: Times as much with wgmma, which wants them back in shared memory.
        dequantise_groups: Times as much where a step has several groups, and loads scales for each.
        spill: Times slower where the registers wanted are twice the limit, less 1.
    """

    wgmma: float = 0.8
    swapped: float = 0.6
    mma: float = 0.7
    mma_fp8: float = 0.5
    no_rate_tflops: float = 100.0
    block_scale: float = 0.5
    dequantise: float = 0.5
    dequantise_wgmma: float = 1.0
    dequantise_groups: float = 1.5
    spill: float = 5.0


@dataclass(frozen=True)
class Memory:
    """Rates of the memories (GB/s), and what short rows cost.

    Attributes:
        dram: Share of the data sheet's bandwidth.
        l2: Of L2, for 132 multiprocessors.
        l2_per_sm: Of L2 to one multiprocessor.
        shared: Of shared memory of one multiprocessor.
        short_loads: Power of (256 bytes / contiguous bytes) by which loads from L2 get slower below 256 bytes.
        short_dram: The same of DRAM's traffic.
    """

    dram: float = 0.85
    l2: float = 6000.0
    l2_per_sm: float = 100.0
    shared: float = 150.0
    short_loads: float = 0.3
    short_dram: float = 0.1


@dataclass(frozen=True)
class Pipeline:
    """What a program and its loop cost beside computing and loading (µs where nothing else is said).

    Attributes:
        latency: Of a load from DRAM.
        sync: Of a step's barriers.
        per_100_warps: More of it, per 100 warps.
        per_100_copies: Of issuing 100 loads of 16 bytes.
        alone: Share of its loads that a program alone does not hide behind computing.
        prologue: Of a program.
        epilogue: Per 128 x 128 tile that a multiprocessor writes.
        fill: Per 100 KB that fill the pipeline of a program.
        idle: Of a program that finds no tile.
        launch: Of a launch.
        whole_waves: Share of the programs that wait for the slowest of their wave; the rest fill in.
        overlap: Power of the smooth maximum of what a step overlaps.
        bound: The same of a launch: multiprocessors, DRAM, L2.
    """

    latency: float = 0.8
    sync: float = 0.05
    per_100_warps: float = 0.3
    per_100_copies: float = 0.3
    alone: float = 1.0
    prologue: float = 1.5
    epilogue: float = 0.3
    fill: float = 0.3
    idle: float = 0.01
    launch: float = 2.0
    whole_waves: float = 0.6
    overlap: float = 3.0
    bound: float = 3.0


REGISTERS: Final = RegisterCounts()
TENSOR_CORES: Final = TensorCores()
MEMORY: Final = Memory()
PIPELINE: Final = Pipeline()


@functools.lru_cache(maxsize=4096)
def expected_tiles(shape: MoEShape, batch_size: int, block_size_m: int) -> tuple[float, float]:
    """Expected tiles along M and experts visited, if tokens choose experts uniformly.

    A routed expert's tokens are binomial: each of the M tokens visits it with the probability of
    :func:`~moeopt.kernels.work.routed_share`.
    """
    shared, share = shape.shared_experts, routed_share(shape)
    most = -(-batch_size // block_size_m)
    experts = expected_visits(shape, batch_size).experts
    if share in (0.0, 1.0):
        return experts * most, experts
    counts = np.arange(batch_size + 1, dtype=np.float64)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(counts[1:]))))
    log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
    mass = np.exp(log_choose + counts * np.log(share) + (batch_size - counts) * np.log1p(-share))
    return shared * most + (shape.num_experts - shared) * float(mass @ np.ceil(counts / block_size_m)), experts


@dataclass(frozen=True)
class LaunchParts:
    """What the formula makes of each config of one cell; all arrays are [number of configs].

    Attributes:
        fields: Of :func:`moeopt.core.config.config_table`, as floats.
        us: The formula's microseconds.
        body_us: Of them, what the multiprocessors need if memory were no limit.
        dram_us: What DRAM needs if nothing else were.
        occupancy: Programs that fit on one multiprocessor at a time.
        waves: Programs over those that run at a time on the whole GPU.
        valid_rows: Mean rows of a tile that hold a token.
        in_flight: Loop steps whose loads are in flight.
        registers: Estimated registers per thread, within the limit.
        spilled: Estimated registers over the limit, relative to it.
        wgmma: Whether the tensor cores read shared memory.
        swapped: Whether the transposed tile is computed.
        step_bytes: Bytes of one row of W that one loop step reads.
        steps: Loop steps of a program.
    """

    fields: Array
    us: Array
    body_us: Array
    dram_us: Array
    occupancy: Array
    waves: Array
    valid_rows: Array
    in_flight: Array
    registers: Array
    spilled: Array
    wgmma: NDArray[np.bool_]
    swapped: NDArray[np.bool_]
    step_bytes: Array
    steps: Array


class _Launch:
    """One cell's configs, column by column; arrays are [number of configs]."""

    def __init__(self, shape: MoEShape, gpu: GpuSpec, role: Role, batch_size: int, fields: Array) -> None:
        self.shape, self.gpu, self.role, self.batch_size = shape, gpu, role, batch_size
        self.bm, self.bn, self.bk, self.warps, self.stages, self.maxnreg = columns(
            fields, "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "maxnreg"
        )
        self.spec, self.architecture = shape.spec, gpu.architecture
        self.a_bytes, self.w_bytes = self.spec.activation_bits / 8, self.spec.weight_bits / 8
        self.rows, self.reduction = shape.output_rows(role), shape.reduction(role)
        self.pairs = batch_size * shape.top_k
        self.num_sms = gpu.multiprocessors
        self.hopper = self.architecture.instruction == "wgmma"
        self.path = code_path(self.architecture, self.spec, self.bm, self.bn, self.warps)
        self.swapped, self.wgmma = self.path.swapped, self.path.from_shared & self.hopper
        self.steps = np.ceil(self.reduction / self.bk)
        # 16-byte loads of one thread per step.
        self.copies = (self.bm * self.a_bytes + self.bn * self.w_bytes) * self.bk / (16 * 32 * self.warps)
        # Under 256 contiguous bytes, loads are less efficient.
        self.short = np.maximum(1.0, 256 / (self.bk * self.w_bytes))
        self._tiles()
        self._occupancy()

    def _tiles(self) -> None:
        """Programs with and without a tile, experts visited, rows of a tile that hold a token."""
        by_bm = {b: expected_tiles(self.shape, self.batch_size, int(b)) for b in np.unique(self.bm)}
        tiles_m = np.array([max(by_bm[b][0], 1e-9) for b in self.bm])
        self.active = next(iter(by_bm.values()))[1] if by_bm else 0.0
        tiles_n = np.ceil(self.rows / self.bn)
        self.programs = tiles_m * tiles_n
        most_rows = np.minimum(self.pairs + self.shape.num_experts * (self.bm - 1), self.pairs * self.bm)
        self.launched = np.ceil(most_rows / self.bm) * tiles_n
        self.valid = np.minimum(expected_visits(self.shape, self.batch_size).pairs / tiles_m, self.bm)

    def _occupancy(self) -> None:
        """Registers and shared memory decide how many programs a multiprocessor runs at a time."""
        wanted = self._registers_wanted()
        most = np.where(self.maxnreg > 0, self.maxnreg, REGISTERS.most)
        self.spilled = np.maximum(0.0, wanted - most) / most
        self.registers = np.clip(wanted, 32, most)
        blocks = blocks_per_multiprocessor(self.gpu, self._shared_bytes(), self.registers, self.warps)
        self.occupancy: Array = np.maximum(functools.reduce(np.minimum, blocks.values()), 1)
        self.resident = np.minimum(self.occupancy, np.maximum(1, self.programs / self.num_sms))
        self.waves = self.programs / (self.num_sms * self.occupancy)

    def _shared_bytes(self) -> Array:
        """Bytes of shared memory of a program, scales left out."""
        buffers = pipeline_bytes(self.path, self.spec, self.bm, self.bn, self.bk, self.stages)
        return np.asarray(buffers + converted_bytes(self.path, self.spec, self.bn, self.bk))

    def _registers_wanted(self) -> Array:
        """Registers of a thread if there were no limit."""
        r, sums = REGISTERS, self.bm * self.bn / (32 * self.warps)
        if self.shape.group_size:
            weights = self.bn * self.bk / (64 * self.warps)
            base = np.where(self.wgmma, *(r.grouped_base[i] + r.grouped_per_weight[i] * weights for i in (1, 0)))
            return np.asarray(base + r.grouped_per_sum * sums)
        operands = (self.bm + self.bn) * self.a_bytes / (8 * np.sqrt(self.warps))
        scaled = 1 + r.per_block_sum * bool(self.shape.block_shape)
        return np.asarray(
            r.base
            + r.per_sum * scaled * self.bm * self.bn / (32 * self.warps)
            + r.per_copy * self.copies
            + np.where(self.wgmma, 0.0, r.per_operand * operands)
        )

    def load_bytes(self) -> Array:
        """Bytes that a step loads, with what short rows cost."""
        return np.asarray(
            (self.valid * self.a_bytes + self.bn * self.w_bytes) * self.bk * self.short**MEMORY.short_loads
        )

    def compute_us(self) -> Array:
        """µs of a step's products, operands through shared memory, scales and conversions, on one multiprocessor."""
        t, bm, bn, bk = TENSOR_CORES, self.bm, self.bn, self.bk
        rates = {"fp8": self.gpu.fp8_tflops, "int8": self.gpu.int8_tops}
        tflops = float(rates.get(self.spec.compute, 0.0) or self.gpu.bf16_tflops or t.no_rate_tflops)
        mma = t.mma * self.architecture.mma_rate
        if self.hopper and self.spec.compute == "fp8":
            mma *= t.mma_fp8
        efficiency = np.where(self.wgmma, t.wgmma * np.where(self.swapped, t.swapped, 1.0), mma)
        computed_rows = np.where(self.wgmma & ~self.swapped, np.maximum(bm, 64), bm)
        warps_m = np.minimum(np.where(bm >= bn, self.warps, np.minimum(2, self.warps)), bm / 16)
        through_shared = np.where(
            self.wgmma,
            (64 * self.a_bytes + bn * self.w_bytes) * bk * np.maximum(bm / 64, 1),
            (bm * self.a_bytes * self.warps / warps_m + bn * self.w_bytes * warps_m) * bk,
        )
        out = (
            2 * computed_rows * bn * bk / (tflops * 1e6 / self.num_sms * efficiency)
            + through_shared / (MEMORY.shared * 1e3)
            + (t.block_scale * bm * bn / 1e5 if self.shape.block_shape else 0.0)
        )
        if self.shape.group_size:
            convert = t.dequantise * bn * bk / 1e5 * np.where(self.wgmma, t.dequantise_wgmma, 1.0)
            out = out + convert * np.where(bk > self.shape.group_size, t.dequantise_groups, 1.0)
        return np.asarray(out)

    def body_us(self, in_flight: Array) -> Array:
        """µs of all programs on the multiprocessors, if DRAM and L2 were no limit."""
        p = PIPELINE
        compute, load = self.compute_us(), self.load_bytes() / (MEMORY.l2_per_sm * 1e3)
        slower = 1 + TENSOR_CORES.spill * self.spilled
        overhead = p.sync + p.per_100_warps * self.warps / 100 + p.per_100_copies * self.copies / 100
        alone = overhead + (compute + p.alone * load) * slower
        together = self.resident * np.maximum(compute, load) * slower
        step = _soft_max(p.overlap, together, p.latency / in_flight + alone)
        epilogue = p.epilogue * self.resident * self.bm * self.bn / 16384
        fill = p.prologue + epilogue + p.fill * in_flight * self.copies * self.warps / 195.3
        part = p.whole_waves * np.ceil(self.waves) + (1 - p.whole_waves) * self.waves
        return np.asarray(np.where(self.waves < 1, 1.0, part) * (self.steps * step + fill))

    def dram_us(self) -> Array:
        """µs of reading the visited experts' weights and the activations, and writing the output, at DRAM's rate."""
        weights = self.active * self.rows * self.reduction * self.w_bytes * self.short**MEMORY.short_dram
        tokens = self.batch_size if self.role == "up" else self.pairs
        traffic = weights + activation_bytes(self.shape, self.role, tokens)
        traffic = traffic + output_bytes(self.shape, self.role, self.batch_size)
        return np.asarray(traffic / (max(self.gpu.bandwidth_gbps, 1.0) * 1e3 * MEMORY.dram))


def launch_parts(shape: MoEShape, gpu: GpuSpec, role: Role, batch_size: int, fields: Array) -> LaunchParts:
    """The formula.

    Args:
        shape: The layer.
        gpu: Data-sheet numbers.
        role: Which projection.
        batch_size: Tokens.
        fields: Of :func:`moeopt.core.config.config_table`, as floats.
    """
    one = _Launch(shape, gpu, role, batch_size, fields)
    in_flight = np.minimum(np.maximum(one.stages - 1, 1), one.steps)
    body, dram = one.body_us(in_flight), one.dram_us()
    l2 = one.programs * one.steps * one.load_bytes() / (MEMORY.l2 * 1e3 * one.num_sms / 132)
    idle = PIPELINE.idle * (one.launched - one.programs) / one.num_sms
    us = _soft_max(PIPELINE.bound, body, dram, l2) + PIPELINE.launch + idle
    return LaunchParts(
        fields=fields,
        us=np.maximum(us, 1e-3),
        body_us=body,
        dram_us=dram,
        occupancy=one.occupancy,
        waves=one.waves,
        valid_rows=one.valid,
        in_flight=in_flight,
        registers=one.registers,
        spilled=one.spilled,
        wgmma=one.wgmma,
        swapped=one.swapped,
        step_bytes=one.bk * one.w_bytes,
        steps=one.steps,
    )


def _soft_max(power: float, *times: Array) -> Array:
    """A smooth maximum: what overlaps hides the shorter part, but not for free."""
    total: Array = np.sum([time**power for time in times], axis=0)
    return np.asarray(total ** (1 / power), dtype=np.float64)
