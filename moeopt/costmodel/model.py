"""How long a launch takes, from the launch config and a GPU's data sheet alone.

Two parts. A formula: bytes and FLOPs per tile, programs per multiprocessor (occupancy), waves over the
multiprocessors, pipeline depth, registers, DRAM and L2 traffic; its constants are round numbers of their kind, and
only the registers of a thread are fitted, on binaries. And, on the architecture that was recorded, a correction of its
logarithm: boosted regression trees over what the formula knows of a launch, fitted on recordings
(``benchmarks/costmodel.py`` fits and judges them). There is one fit for every recorded layer that leaves its
recordings out, so that nothing is predicted from its own times. Good for ranking the configs of one cell, not
for promising a time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeopt.core.config import COLUMN, LaunchConfig, columns, config_table
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import DTYPES, ROLES, MoEShape, Role

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
# SM120 parts a linear correction moved upstream's tuned choices back; these trees were not tried there.
_CORRECTED: Final = 9
_MOST_CORRECTION: Final = 1.0
_GROUP: Final = COLUMN["GROUP_SIZE_M"]  # which the formula does not know
_ROWS: Final = 2**17  # for which trees are walked at once
_NO_RATE_TFLOPS: Final = 100.0
# Of an H200 with 16 cores: both roles of a config compile in 0.9 s (median, 15 processes).
_COMPILE_S: Final = 0.9
_CACHED_S: Final = 0.05
_START_S: Final = 10.0
_TRIAL_S: Final = 0.005
_LAUNCHES: Final = 40
_UNHIDDEN: Final = 0.2


# The formula's constants. Shares of a data sheet's rate: of tensor cores reading shared memory (wgmma, swapped) or
# registers (mma; mma_fp8: where fp8 is converted first), of DRAM. Rates in GB/s: of L2 to one multiprocessor and of
# all (of 132), of shared memory. Microseconds: latency of a load, sync per step, prologue and launch per program and
# launch, idle per program that finds no tile; per 100: of warps and of copies. The rest are exponents and factors.
CONSTANTS: Final[Mapping[str, float]] = {
    "wgmma": 0.8, "mma": 0.7, "mma_fp8": 0.5, "swapped": 0.6, "l2_per_unit": 100.0, "l2": 6000.0, "shared": 150.0,
    "latency": 0.8, "sync": 0.05, "warps": 0.3, "issue": 0.3, "alone": 1.0, "prologue": 1.5, "epilogue": 0.3,
    "fill": 0.3, "idle": 0.01, "launch": 2.0, "dram": 0.85, "short_loads": 0.3, "short_dram": 0.1, "block_scale": 0.5,
    "dequantise": 0.5, "dequantise_wgmma": 1.0, "dequantise_groups": 1.5, "spill": 5.0, "whole_waves": 0.6,
    "overlap": 3.0, "bound": 3.0,
}  # fmt: skip

FITTED: Final = "costmodel.npz"
EVERYTHING: Final = "all"  # the fit that leaves nothing out
FEATURES: Final = 22
DEPTH: Final = 6  # of a tree, at most


@dataclass(frozen=True, eq=False)
class Correction:
    """Boosted regression trees for log(measured / formula), up to a level of a cell.

    The nodes of all trees lie one after the other; a right child comes after its left one, a leaf is its own child.

    Attributes:
        roots: First node of each tree, int32 [trees].
        feature: What a node looks at, a column of :func:`launch_features`, or the one after them for log2 of
            GROUP_SIZE_M; int32 [nodes].
        threshold: Up to here the next is the left child; infinite in a leaf; float32 [nodes].
        left: int32 [nodes].
        value: What a leaf adds, float32 [nodes].
    """

    roots: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    left: NDArray[np.int32]
    value: NDArray[np.float32]

    def __call__(self, features: Array, tile: NDArray[np.int64], group: Array) -> Array:
        """The sum over the trees, float64 [configs].

        Few trees look at GROUP_SIZE_M: the others are walked once for the configs that differ in it alone.

        Args:
            features: Of :func:`launch_features`, [tiles, features].
            tile: Which of these each config has, [configs].
            group: log2 of GROUP_SIZE_M, [configs].
        """
        by_group = self._by_group()
        whole = np.column_stack([features[tile], group])
        return self._walk(features, self.roots[~by_group])[tile] + self._walk(whole, self.roots[by_group])

    def _by_group(self) -> NDArray[np.bool_]:
        """Which trees look at GROUP_SIZE_M."""
        asks = np.isfinite(self.threshold) & (self.feature == FEATURES)
        return np.add.reduceat(asks, self.roots) > 0

    def _walk(self, features: Array, roots: NDArray[np.int32]) -> Array:
        columns = np.ascontiguousarray(features.T, dtype=np.float32)
        flat, rows = columns.ravel(), np.arange(len(features), dtype=np.int32)
        start = self.feature * np.int32(len(features))
        out = np.zeros(len(features))
        for root in roots:
            node = np.full(len(features), root, dtype=np.int32)
            for _ in range(DEPTH):
                asked = flat.take(start.take(node) + rows)
                node = self.left.take(node) + (asked > self.threshold.take(node))
            out += self.value.take(node)
        return out


@functools.lru_cache(maxsize=4)
def load_correction(without: MoEShape | None = None) -> Correction:
    """The shipped correction.

    Args:
        without: Fitted without any recording of this shape, on whatever GPU and with whatever kernel.
    """
    with np.load(str(resources.files("moeopt.costmodel") / FITTED)) as arrays:
        name = EVERYTHING if without is None or f"{without.slug()}/sizes" not in arrays else without.slug()
        return unpack_correction({key: arrays[f"{name}/{key}"] for key in ("sizes", "nodes", "numbers")})


def unpack_correction(packed: Mapping[str, NDArray[np.generic]]) -> Correction:
    """A correction from what :func:`pack_correction` made of it."""
    sizes = packed["sizes"].astype(np.int32)
    roots = np.cumsum(sizes, dtype=np.int32) - sizes
    feature, left = packed["nodes"].astype(np.int32)
    threshold, value = packed["numbers"].astype(np.float32)
    arrays = (roots, feature, threshold, left + np.repeat(roots, sizes), value)
    for array in arrays:
        array.flags.writeable = False  # one is kept for all who ask
    return Correction(*arrays)


def pack_correction(correction: Correction) -> dict[str, NDArray[np.generic]]:
    """Arrays for a file: nodes per tree; feature and left child within the tree; threshold and value."""
    sizes = np.diff(np.append(correction.roots, len(correction.feature)))
    left = correction.left - np.repeat(correction.roots, sizes)
    return {
        "sizes": sizes.astype(np.uint8),
        "nodes": np.stack([correction.feature, left]).astype(np.uint8),
        "numbers": np.stack([correction.threshold, correction.value]),
    }


def predict_us(
    shape: MoEShape,
    gpu: GpuSpec,
    role: Role,
    batch_size: int,
    configs: Sequence[LaunchConfig],
    *,
    corrected: bool = True,
) -> Array:
    """Predicted microseconds of one launch for each config, uniform routing.

    Args:
        shape: The layer.
        gpu: Its bandwidth, rates, multiprocessors, shared memory and registers are used.
        role: Which projection.
        batch_size: Tokens.
        configs: What to predict for; those that the GPU cannot run get a number too.
        corrected: By what was fitted on recordings of other shapes, on an architecture that was recorded.

    Returns:
        float64 [len(configs)], finite and positive.
    """
    rows = predict_table_us(shape, gpu, role, [batch_size], config_table(configs).astype(float), corrected=corrected)
    return np.asarray(rows[0])


def predict_table_us(
    shape: MoEShape, gpu: GpuSpec, role: Role, batch_sizes: Sequence[int], fields: Array, *, corrected: bool = True
) -> Array:
    """:func:`predict_us` for several batch sizes: float64 [batch sizes, configs].

    Args:
        shape: The layer.
        gpu: See there.
        role: Which projection.
        batch_sizes: Tokens.
        fields: Of :func:`moeopt.core.config.config_table`, as floats.
        corrected: See there.
    """
    rows, row = np.unique(fields, axis=0, return_inverse=True)
    tiles, tile = np.unique(np.delete(rows, _GROUP, axis=1), axis=0, return_inverse=True)
    row, tile, group = row.ravel(), tile.ravel(), np.log2(rows[:, _GROUP])
    corrected = corrected and gpu.compute_capability[0] == _CORRECTED
    us = np.empty((len(batch_sizes), len(rows)))
    # The trees are walked for several batch sizes at once: fewer calls, but memory for all their rows.
    at_once = max(1, _ROWS // max(len(rows), 1))
    for first in range(0, len(batch_sizes), at_once):
        some = batch_sizes[first : first + at_once]
        cells = [launch_parts(shape, gpu, role, m, np.insert(tiles, _GROUP, 1.0, axis=1)) for m in some]
        part: Array = np.array([parts.us[tile] for parts in cells])
        if corrected:
            features = [launch_features(shape, role, m, parts) for m, parts in zip(some, cells, strict=True)]
            of = (np.arange(len(cells))[:, None] * len(tiles) + tile).ravel()
            found = load_correction(shape)(np.concatenate(features), of, np.tile(group, len(cells)))
            part = part * np.exp(np.clip(found.reshape(part.shape), -_MOST_CORRECTION, _MOST_CORRECTION))
        us[first : first + at_once] = part
    return us[:, row]


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
            us = float(predict_us(shape, gpu, role, m, [typical], corrected=False)[0])
            timing += trials * (_TRIAL_S + _LAUNCHES * us * 1e-6)
    return float(_START_S + max(compiling, timing) + _UNHIDDEN * min(compiling, timing))


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
        fields: Of :func:`moeopt.core.config.config_table`, as floats.
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
        steps: Loop steps of a program.
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
    steps: Array


def launch_parts(shape: MoEShape, gpu: GpuSpec, role: Role, batch_size: int, fields: Array) -> LaunchParts:
    """The formula.

    Args:
        shape: The layer.
        gpu: Data-sheet numbers.
        role: Which projection.
        batch_size: Tokens.
        fields: Of :func:`moeopt.core.config.config_table`, as floats.
    """
    k = CONSTANTS
    keys = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "maxnreg")
    bm, bn, bk, warps, stages, maxnreg = columns(fields, *keys)
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
    share = (shape.top_k - shape.shared_experts) / shape.ep_size + shape.shared_experts
    valid = np.minimum(batch_size * share / tiles_m, bm)

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
        steps=steps,
    )


def launch_features(shape: MoEShape, role: Role, batch_size: int, parts: LaunchParts) -> Array:
    """What a correction looks at, but for GROUP_SIZE_M: float64 [number of configs, FEATURES].

    No length of a weight's side is among them, so that it holds for layers larger than the recorded ones.

    Args:
        shape: The layer.
        role: Which projection.
        batch_size: Tokens.
        parts: Of :func:`launch_parts`.
    """
    bm, bn, warps, stages = columns(parts.fields, "BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_warps", "num_stages")
    one = np.ones_like(bm)
    tokens = batch_size * shape.top_k / (shape.num_experts * shape.ep_size)
    return np.stack(
        [
            np.log2(bm), np.log2(bn), np.log2(parts.step_bytes), np.log2(warps), stages,
            np.log2(parts.occupancy), np.log2(parts.rounds), np.log2(parts.valid_rows), np.log2(parts.in_flight),
            np.log2(parts.registers), np.minimum(parts.spilled, 2.0), parts.wgmma * one, parts.swapped * one,
            parts.dram_us / (parts.dram_us + parts.body_us), np.log2(bm / parts.valid_rows), one * np.log2(tokens),
            one * bool(shape.block_shape), one * bool(shape.group_size), one * (role == "up"),
            np.log2(bm * bn / warps), np.log2(parts.steps), one * bool(shape.per_channel),
        ],
        axis=1,
    )  # fmt: skip


def _soft_max(power: float, *times: Array) -> Array:
    """A smooth maximum: what overlaps hides the shorter part, but not for free."""
    total: Array = np.sum([time**power for time in times], axis=0)
    return np.asarray(total ** (1 / power), dtype=np.float64)


def _tensor_tflops(shape: MoEShape, gpu: GpuSpec) -> float:
    rates = {"fp8": gpu.fp8_tflops, "int8": gpu.int8_tops}
    return float(rates.get(DTYPES[shape.dtype].compute, 0.0) or gpu.bf16_tflops or _NO_RATE_TFLOPS)
