"""How long a launch takes, from the launch config and a GPU's data sheet alone.

Two parts. A formula: bytes and FLOPs per tile, programs per multiprocessor (occupancy), waves over the
multiprocessors, pipeline depth, registers, DRAM and L2 traffic. And, on the architecture that was recorded,
a linear correction of its logarithm, over powers of the config's values in the regimes that the formula
tells apart. The GPU's numbers are inputs to both; the coefficients were fitted on recordings
(``benchmarks/costmodel.py`` fits and judges them). Good for ranking the configs of one cell, not for promising a time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeopt.costmodel_fitted import CORRECTION, FORMULA
from moeopt.gpu import GpuSpec
from moeopt.shape import DTYPES, ROLES, MoEShape, Role
from moeopt.space import LaunchConfig

Array = NDArray[np.float64]

# Registers of one thread: fitted on 964 binaries of an H200, median error 6 registers.
_REGISTERS_BASE: Final = 25.1
_REGISTERS_PER_SUM: Final = 1.063
_REGISTERS_PER_BLOCK_SUM: Final = 1.274
_REGISTERS_PER_COPY: Final = 2.90
_REGISTERS_PER_OPERAND: Final = 0.676
# The same of weights in groups, which are converted in registers: fitted on 3,091 binaries, error 19 registers.
_GROUPED_BASE: Final = (46.0, 75.0)  # mma, wgmma
_GROUPED_PER_SUM: Final = 1.6
_GROUPED_PER_WEIGHT: Final = (1.2, 0.7)
_MOST_REGISTERS: Final = 255
_HOPPER_MMA: Final = 0.62
# All recordings are of this compute capability, and what the formula misses there is of its tensor cores: on
# SM120 parts the correction moved upstream's tuned choices back (benchmarks/results/upstream-sm120.json).
_CORRECTED: Final = 9
_MOST_CORRECTION: Final = 1.0
_NO_RATE_TFLOPS: Final = 100.0
# Of an H200 with 16 cores: both roles of a config compile in 0.9 s (median, 15 processes).
_COMPILE_S: Final = 0.9
_CACHED_S: Final = 0.05
_START_S: Final = 10.0
_TRIAL_S: Final = 0.005
_LAUNCHES: Final = 40
_UNHIDDEN: Final = 0.2


@dataclass(frozen=True, eq=False)
class Coefficients:
    """What a fit found.

    Attributes:
        formula: By name, see :data:`moeopt.costmodel_fitted.FORMULA`.
        correction: One for each of :func:`correction_features`.
    """

    formula: Mapping[str, float]
    correction: Sequence[float]


SHIPPED: Final = Coefficients(FORMULA, CORRECTION)


def predict_us(
    shape: MoEShape,
    gpu: GpuSpec,
    role: Role,
    batch_size: int,
    configs: Sequence[LaunchConfig],
    coefficients: Coefficients = SHIPPED,
) -> Array:
    """Predicted microseconds of one launch for each config, uniform routing.

    Args:
        shape: The layer.
        gpu: Its bandwidth, rates, multiprocessors, shared memory and registers are used.
        role: Which projection.
        batch_size: Tokens.
        configs: What to predict for; those that the GPU cannot run get a number too.
        coefficients: Of another fit, to judge it.

    Returns:
        float64 [len(configs)], finite and positive.
    """
    parts = launch_parts(shape, gpu, role, batch_size, config_fields(configs), coefficients.formula)
    if gpu.compute_capability[0] != _CORRECTED:
        return parts.us
    correction = correction_features(parts) @ np.asarray(coefficients.correction)
    return np.asarray(parts.us * np.exp(np.clip(correction, -_MOST_CORRECTION, _MOST_CORRECTION)))


def estimate_tune_seconds(
    shape: MoEShape, gpu: GpuSpec, batch_sizes: Sequence[int], trials: int, cores: int, *, compiled: bool = False
) -> float | None:
    """Roughly how long a split tune takes where nothing is known before.

    Compiling runs beside timing. Distinct configs grow with the root of the number of batch sizes, as they
    are shared among them (175 of 24 trials times 6 batch sizes, seen on recordings).

    Args:
        shape: The layer.
        gpu: Where.
        batch_sizes: M.
        trials: Configs timed per batch size and role.
        cores: Compile processes.
        compiled: Whether Triton's cache holds all binaries (``moeopt compile`` filled it): then it is timing alone.

    Returns:
        Seconds, or None where the GPU's bandwidth is not known.
    """
    if gpu.bandwidth_gbps <= 0:
        return None
    configs = min(7.3 * trials * (len(batch_sizes) / 6) ** 0.5, 2.0 * trials * len(batch_sizes))
    compiling = configs * (_CACHED_S if compiled else _COMPILE_S) / max(cores, 1)
    typical = LaunchConfig(64, 64, 128 if DTYPES[shape.dtype].activation_bits == 8 else 64, 8, 4, 3)
    timing = 0.0
    for role in ROLES:
        for m in batch_sizes:
            us = float(predict_us(shape, gpu, role, m, [typical])[0])
            timing += trials * (_TRIAL_S + _LAUNCHES * us * 1e-6)
    return float(_START_S + max(compiling, timing) + _UNHIDDEN * min(compiling, timing))


def config_fields(configs: Sequence[LaunchConfig]) -> Array:
    """The configs' numbers: float64 [len(configs), 7], BLOCK_SIZE_M first and maxnreg last."""
    rows = [
        (c.block_size_m, c.block_size_n, c.block_size_k, c.group_size_m, c.num_warps, c.num_stages, c.maxnreg)
        for c in configs
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, 7)


@functools.lru_cache(maxsize=4096)
def expected_tiles(shape: MoEShape, batch_size: int, block_size_m: int) -> tuple[float, float]:
    """Expected tiles along M and experts visited, if tokens choose experts uniformly.

    An expert's tokens are binomial: each of the M tokens visits it with probability top_k / experts.
    """
    shared = shape.shared_experts
    routed = shape.num_experts - shared
    share = (shape.top_k - shared) / (routed * shape.ep_size) if routed else 0.0
    most = -(-batch_size // block_size_m)
    if share >= 1.0:
        return float((shared + routed) * most), float(shared + routed)
    tiles, active = float(shared * most), float(shared)
    if share > 0.0:
        counts = np.arange(batch_size + 1, dtype=np.float64)
        log_factorial = np.concatenate(([0.0], np.cumsum(np.log(counts[1:]))))
        log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
        mass = np.exp(log_choose + counts * np.log(share) + (batch_size - counts) * np.log1p(-share))
        tiles += routed * float(mass @ np.ceil(counts / block_size_m))
        active += routed * (1.0 - float(mass[0]))
    return tiles, active


@dataclass(frozen=True)
class LaunchParts:
    """What the formula makes of each config of one cell; all arrays are [number of configs].

    Attributes:
        fields: Of :func:`config_fields`.
        us: The formula's microseconds.
        body_us: Of them, what the multiprocessors need if memory were no limit.
        dram_us: What DRAM needs if nothing else were.
        occupancy: Programs that fit on one multiprocessor at a time.
        rounds: Programs over those that run at a time on the whole GPU.
        valid_rows: Mean rows of a tile that hold a token.
        in_flight: Loop steps whose loads are in flight.
        registers: Estimated registers per thread, within the limit.
        spilled: Estimated registers over the limit, relative to it.
        wgmma: Whether the tensor cores read shared memory.
        swapped: Whether the transposed tile is computed.
        step_bytes: Bytes of one row of W that one loop step reads.
        reduction: Length of the dot products.
    """

    fields: Array
    us: Array
    body_us: Array
    dram_us: Array
    occupancy: Array
    rounds: Array
    valid_rows: Array
    in_flight: Array
    registers: Array
    spilled: Array
    wgmma: NDArray[np.bool_]
    swapped: NDArray[np.bool_]
    step_bytes: Array
    reduction: int


def launch_parts(
    shape: MoEShape, gpu: GpuSpec, role: Role, batch_size: int, fields: Array, k: Mapping[str, float]
) -> LaunchParts:
    """The formula.

    Args:
        shape: The layer.
        gpu: Data-sheet numbers.
        role: Which projection.
        batch_size: Tokens.
        fields: Of :func:`config_fields`.
        k: Its coefficients, as :data:`moeopt.costmodel_fitted.FORMULA` names them.
    """
    bm, bn, bk, _, warps, stages, maxnreg = fields.T
    spec = DTYPES[shape.dtype]
    a_bytes, w_bytes = spec.activation_bits / 8, spec.weight_bits / 8
    rows, reduction = shape.output_rows(role), shape.reduction(role)
    pairs = batch_size * shape.top_k
    units = gpu.multiprocessors

    by_bm = {b: expected_tiles(shape, batch_size, int(b)) for b in np.unique(bm)}
    tiles_m = np.array([max(by_bm[b][0], 1e-9) for b in bm])
    active = next(iter(by_bm.values()))[1] if by_bm else 0.0
    tiles_n = np.ceil(rows / bn)
    steps = np.ceil(reduction / bk)
    programs = tiles_m * tiles_n
    launched = np.ceil(np.minimum(pairs + shape.num_experts * (bm - 1), pairs * bm) / bm) * tiles_n
    valid = np.minimum(pairs / tiles_m, bm)

    # Registers and shared memory decide how many programs a multiprocessor runs at a time.
    hopper = gpu.compute_capability[0] == 9
    swapped = (bm < 64) & (bn >= 64) & (hopper and shape.dtype == "fp8_w8a8")
    wgmma = ((bm >= 64) | swapped) & (warps >= 4) & hopper
    buffers = np.where(wgmma, stages, stages - 1)
    shared = buffers * (bm * a_bytes + bn * w_bytes) * bk
    if shape.group_size:
        shared = (buffers * bm * a_bytes + (stages - 1 + np.where(wgmma, a_bytes / w_bytes, 0)) * bn * w_bytes) * bk
    copies = (bm * a_bytes + bn * w_bytes) * bk / (16 * 32 * warps)  # 16-byte loads of one thread per step
    wanted = (
        _REGISTERS_BASE
        + _REGISTERS_PER_SUM * (1 + _REGISTERS_PER_BLOCK_SUM * bool(shape.block_shape)) * bm * bn / (32 * warps)
        + _REGISTERS_PER_COPY * copies
        + np.where(wgmma, 0.0, _REGISTERS_PER_OPERAND * (bm + bn) * a_bytes / (8 * np.sqrt(warps)))
    )
    if shape.group_size:
        converted = bn * bk / (64 * warps)
        wanted = np.where(wgmma, *(_GROUPED_BASE[i] + _GROUPED_PER_WEIGHT[i] * converted for i in (1, 0)))
        wanted = wanted + _GROUPED_PER_SUM * bm * bn / (32 * warps)
    most = np.where(maxnreg > 0, maxnreg, _MOST_REGISTERS)
    spilled = np.maximum(0.0, wanted - most) / most
    registers = np.clip(wanted, 32, most)
    fits = np.minimum(
        np.floor(gpu.shared_memory_per_multiprocessor / (shared + 1024)),
        np.floor(gpu.registers_per_multiprocessor / (np.ceil(registers / 8) * 8 * 32 * warps)),
    )
    occupancy = np.clip(np.minimum(fits, np.floor(gpu.warps_per_multiprocessor / warps)), 1, 32)
    resident = np.minimum(occupancy, np.maximum(1, programs / units))
    rounds = programs / (units * occupancy)
    whole = min(k["whole_waves"], 1.0)
    waves = np.where(rounds < 1, 1.0, whole * np.ceil(rounds) + (1 - whole) * rounds)

    # One step along K of one program, in µs: alone, and as one of those that share a multiprocessor.
    rate = _tensor_tflops(shape, gpu) * 1e6 / units
    # Hopper's data sheet counts wgmma; its mma has 62 % of that rate, and converts fp8 to 16 bits first.
    mma = k["mma"] * (_HOPPER_MMA if hopper else 1.0)
    if hopper and spec.compute == "fp8":
        mma *= k["mma_fp8"]
    efficiency = np.where(wgmma, k["wgmma"] * np.where(swapped, k["swapped"], 1.0), mma)
    computed_rows = np.where(wgmma & ~swapped, np.maximum(bm, 64), bm)
    short = np.maximum(1.0, 256 / (bk * w_bytes))  # under 256 contiguous bytes, loads are less efficient
    load_bytes = (valid * a_bytes + bn * w_bytes) * bk * short ** k["short_loads"]
    load = load_bytes / (k["l2_per_unit"] * 1e3)
    warps_m = np.minimum(np.where(bm >= bn, warps, np.minimum(2, warps)), bm / 16)
    through_shared = np.where(
        wgmma,
        (64 * a_bytes + bn * w_bytes) * bk * np.maximum(bm / 64, 1),
        (bm * a_bytes * warps / warps_m + bn * w_bytes * warps_m) * bk,
    )
    compute = (
        2 * computed_rows * bn * bk / (rate * efficiency)
        + through_shared / (k["shared"] * 1e3)
        + (k["block_scale"] * bm * bn / 1e5 if shape.block_shape else 0.0)
    )
    if shape.group_size:
        # Weights are converted in registers, whatever the rows; wgmma wants them back in shared memory, and a
        # step over several groups loads scales for each.
        convert = k["dequantise"] * bn * bk / 1e5 * np.where(wgmma, k["dequantise_wgmma"], 1.0)
        compute = compute + convert * np.where(bk > shape.group_size, k["dequantise_groups"], 1.0)
    slower = 1 + k["spill"] * spilled
    alone = k["sync"] + k["warps"] * warps / 100 + k["issue"] * copies / 100 + (compute + k["alone"] * load) * slower
    in_flight = np.minimum(np.maximum(stages - 1, 1), steps)
    together = resident * np.maximum(compute, load) * slower
    step = _soft_max(k["overlap"], together, k["latency"] / in_flight + alone)
    fill = k["prologue"] + k["epilogue"] * resident * bm * bn / 16384 + k["fill"] * in_flight * copies * warps / 195.3

    body = waves * (steps * step + fill)
    l2 = programs * steps * load_bytes / (k["l2"] * 1e3 * units / 132)
    a_rows = batch_size if role == "up" else pairs
    traffic = active * rows * reduction * w_bytes * short ** k["short_dram"]
    traffic = traffic + a_rows * reduction * a_bytes + pairs * rows * 2
    dram = traffic / (max(gpu.bandwidth_gbps, 1.0) * 1e3 * k["dram"])
    idle = (launched - programs) / units
    return LaunchParts(
        fields=fields,
        us=np.maximum(_soft_max(k["bound"], body, dram, l2) + k["launch"] + k["idle"] * idle, 1e-3),
        body_us=body,
        dram_us=dram,
        occupancy=occupancy,
        rounds=rounds,
        valid_rows=valid,
        in_flight=in_flight,
        registers=registers,
        spilled=spilled,
        wgmma=wgmma,
        swapped=swapped,
        step_bytes=bk * w_bytes,
        reduction=reduction,
    )


def correction_features(parts: LaunchParts) -> Array:
    """What the linear correction is over: float64 [number of configs, 105].

    21 features of the config, each in five regimes: everywhere, bound by DRAM, few programs, padded tiles,
    short loops.
    """
    bm, bn, _, group, warps, stages, _ = parts.fields.T
    m, n, w = np.log2(bm / 32), np.log2(bn / 64), np.log2(warps / 4)
    k = np.log2(parts.step_bytes / 128)
    depth = np.log2(np.maximum(stages - 1, 1) / 2)
    per_warp = np.log2(bm * bn / warps / 512)
    features = np.stack(
        [
            k, k**2, n, n**2, m, m**2, w, depth, depth**2,
            np.log2(parts.in_flight), np.log2(parts.occupancy), np.minimum(parts.spilled, 2),
            per_warp, per_warp**2, np.log2(parts.registers / 64),
            parts.wgmma.astype(np.float64), parts.swapped.astype(np.float64),
            np.log2(group + 1) * 0.2, w * n, w * m, k * n,
        ],
        axis=1,
    )  # fmt: skip
    regimes = np.stack(
        [
            np.ones_like(bm),
            parts.dram_us / (parts.dram_us + parts.body_us),
            1 / (1 + parts.rounds),
            np.log2(bm / parts.valid_rows) / 4,
            np.full_like(bm, 1 / (1 + parts.reduction / 512)),
        ],
        axis=1,
    )
    products = np.einsum("cf,cr->cfr", features, regimes)
    return np.asarray(products.reshape(len(features), features.shape[1] * regimes.shape[1]))


def _soft_max(power: float, *times: Array) -> Array:
    """A smooth maximum: what overlaps hides the shorter part, but not for free."""
    total: Array = np.sum([time**power for time in times], axis=0)
    return np.asarray(total ** (1 / power), dtype=np.float64)


def _tensor_tflops(shape: MoEShape, gpu: GpuSpec) -> float:
    rates = {"fp8": gpu.fp8_tflops, "int8": gpu.int8_tops}
    return float(rates.get(DTYPES[shape.dtype].compute, 0.0) or gpu.bf16_tflops or _NO_RATE_TFLOPS)
