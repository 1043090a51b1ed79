"""How long a launch takes, from the launch config and a GPU's data sheet alone.

One formula for every GPU: bytes and FLOPs per tile, programs per multiprocessor (occupancy), waves over
the multiprocessors, pipeline depth, registers. Its few coefficients were fitted on recordings of an
NVIDIA H200 (``benchmarks/costmodel.py`` fits and judges them); the GPU's numbers are inputs. Good for
ranking the configs of one cell, not for promising a time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeopt.gpu import GpuSpec
from moeopt.shape import DTYPES, MoEShape, Role
from moeopt.space import LaunchConfig

Array = NDArray[np.float64]

COEFFICIENTS: Final[Mapping[str, float]] = {
    "wgmma": 3.50, "mma": 4.53, "mma_8bit": 0.1146, "l2": 249.0, "shared": 182.0, "latency": 0.879, "sync": 0.0057,
    "prologue": 4.19, "epilogue": 0.289, "empty": 0.0005, "launch": 1.49, "dram": 0.573, "power": 1.88, "ceil": 0.639,
    "scale": 0.514, "spill": 15.2, "base": 48.0, "operands": 0.114, "warps": 0.0050, "issue": 0.0033,
}  # fmt: skip


def predict_us(
    shape: MoEShape,
    gpu: GpuSpec,
    role: Role,
    batch_size: int,
    configs: Sequence[LaunchConfig],
    coefficients: Mapping[str, float] = COEFFICIENTS,
) -> Array:
    """Predicted microseconds of one launch for each config, uniform routing.

    Args:
        shape: The layer.
        gpu: Its bandwidth, rates, multiprocessors, shared memory and registers are used.
        role: Which projection.
        batch_size: Tokens.
        configs: What to predict for; those that the GPU cannot run get a number too.
        coefficients: Of the formula; the fitted ones by default.

    Returns:
        float64 [len(configs)], finite and positive.
    """
    fields = np.array(
        [
            (c.block_size_m, c.block_size_n, c.block_size_k, c.group_size_m, c.num_warps, c.num_stages, c.maxnreg)
            for c in configs
        ],
        dtype=np.float64,
    ).reshape(-1, 7)
    return _predict(shape, gpu, role, batch_size, fields, coefficients)


@functools.lru_cache(maxsize=4096)
def expected_tiles(shape: MoEShape, batch_size: int, block_size_m: int) -> tuple[float, float]:
    """Expected tiles along M and experts visited, if tokens choose experts uniformly.

    An expert's tokens are binomial: each of the M tokens visits it with probability top_k / experts.
    """
    shared = shape.shared_experts
    routed = shape.num_experts - shared
    share = (shape.top_k - shared) / (routed * shape.ep_size) if routed else 0.0
    tiles = shared * -(-batch_size // block_size_m) * 1.0
    active = float(shared)
    if share >= 1.0:
        return tiles + routed * -(-batch_size // block_size_m), active + routed
    if share > 0.0:
        counts = np.arange(batch_size + 1, dtype=np.float64)
        log_factorial = np.concatenate(([0.0], np.cumsum(np.log(counts[1:]))))
        log_choose = log_factorial[-1] - log_factorial - log_factorial[::-1]
        mass = np.exp(log_choose + counts * np.log(share) + (batch_size - counts) * np.log1p(-share))
        tiles += routed * float(mass @ np.ceil(counts / block_size_m))
        active += routed * (1.0 - float(mass[0]))
    return tiles, active


def _predict(
    shape: MoEShape, gpu: GpuSpec, role: Role, batch_size: int, fields: Array, k: Mapping[str, float]
) -> Array:
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

    # Registers and shared memory decide how many programs a multiprocessor runs at a time.
    hopper = gpu.compute_capability[0] == 9
    swapped = hopper & (shape.dtype == "fp8_w8a8") & (bm < 64) & (bn >= 64)
    wgmma = hopper & ((bm >= 64) | swapped) & (warps >= 4)
    buffers = np.where(wgmma & ~swapped, stages, stages - 1)
    shared = buffers * (bm * a_bytes + bn * w_bytes) * bk
    accumulators = bm * bn / (32 * warps) * (2 if shape.block_shape else 1)
    operands = np.where(wgmma, 0.0, k["operands"] * (bm + bn) * 8 / (32 * np.sqrt(warps)))
    wanted = k["base"] + accumulators + operands
    limit = np.where(maxnreg > 0, maxnreg, 255)
    spilled = np.maximum(0.0, wanted - limit) / limit
    registers = np.ceil(np.clip(wanted, 32, limit) / 8) * 8
    occupancy = np.clip(
        np.minimum(
            np.minimum(
                np.floor(gpu.shared_memory_per_multiprocessor / (shared + 1024)),
                np.floor(gpu.registers_per_multiprocessor / (registers * 32 * warps)),
            ),
            np.floor(gpu.warps_per_multiprocessor / warps),
        ),
        1,
        32,
    )
    resident = np.minimum(occupancy, np.maximum(1, programs / units))
    rounds = programs / (units * occupancy)
    waves = np.where(rounds < 1, 1.0, k["ceil"] * np.ceil(rounds) + (1 - k["ceil"]) * rounds)

    # One step along K of one program, in µs of one multiprocessor.
    rate = _tensor_tflops(shape, gpu) * 1e6 / units
    efficiency = np.where(wgmma, k["wgmma"], k["mma"] * (k["mma_8bit"] if spec.activation_bits == 8 else 1.0))
    rows_computed = np.where(wgmma & ~swapped, np.maximum(bm, 64), bm)
    compute = 2 * rows_computed * bn * bk / (rate * efficiency)
    valid = np.minimum(pairs / tiles_m, bm)
    load = (valid * a_bytes + bn * w_bytes) * bk / (k["l2"] * 1e3)
    warps_m = np.minimum(np.where(bm >= bn, warps, np.minimum(2, warps)), bm / 16)
    warps_n = warps / warps_m
    through_shared = np.where(
        wgmma,
        (64 * a_bytes + bn * w_bytes) * bk * np.maximum(bm / 64, 1),
        (bm * a_bytes * warps_n + bn * w_bytes * warps_m) * bk,
    ) / (k["shared"] * 1e3)
    compute = compute + through_shared + (k["scale"] * bm * bn / 1e5 if shape.block_shape else 0.0)
    slower = 1 + k["spill"] * spilled
    issue = k["issue"] * (bm * a_bytes + bn * w_bytes) * bk / (512 * warps) * 0.1
    alone = k["sync"] + k["warps"] * warps / 80 + issue + (compute + load) * slower
    latency = k["latency"] / np.maximum(stages - 1, 1)
    step = _soft_max(resident * np.maximum(compute, load) * slower, latency + alone, k["power"])

    body = waves * (steps * step + k["prologue"] + k["epilogue"] * resident * bm * bn / 16384)
    a_rows = pairs / shape.top_k if role == "up" else pairs
    traffic = active * rows * reduction * w_bytes + a_rows * reduction * a_bytes + pairs * rows * 2
    memory = traffic / (max(gpu.bandwidth_gbps, 1.0) * 1e3 * k["dram"])
    idle = np.maximum(launched - programs, 0.0) / units
    return _soft_max(body, np.full_like(body, memory), k["power"]) + k["launch"] + k["empty"] * idle


def _soft_max(a: Array, b: Array, power: float) -> Array:
    """A smooth maximum: what overlaps hides the shorter part, but not for free."""
    return np.asarray((a**power + b**power) ** (1 / power), dtype=np.float64)


def _tensor_tflops(shape: MoEShape, gpu: GpuSpec) -> float:
    rates = {"fp8": gpu.fp8_tflops, "int8": gpu.int8_tops}
    return rates.get(DTYPES[shape.dtype].compute, 0.0) or gpu.bf16_tflops or 100.0
