"""Coefficients of the cost model, as ``benchmarks/costmodel.py --fit`` prints them.

Fitted on 5 recordings of an NVIDIA H200 (moeopt's own kernel, Triton 3.6.0): E128 K2048 N768 bf16, E8 K4096 N3584
bf16, E128 K4096 N1536 block fp8, E256 K7168 N256 block fp8, E64 K2048 N1024 int8. The recordings of E256
K3072 N256 bf16 and E256 K6144 N256 block fp8 were kept out, to judge it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FORMULA: Final[Mapping[str, float]] = {
    "wgmma": 1.027, "mma": 0.9933, "mma_fp8": 0.3091, "swapped": 0.857, "l2_per_unit": 222.6, "l2": 8052.0,
    "shared": 273.3, "latency": 0.7742, "sync": 0.006767, "warps": 0.0406, "issue": 0.0406, "alone": 0.1353,
    "prologue": 2.008, "epilogue": 0.0406, "fill": 0.0406, "idle": 0.07389, "launch": 5.437, "dram": 1.038,
    "short_loads": 0.0406, "short_dram": 0.4222, "block_scale": 0.06767, "spill": 5.95, "whole_waves": 0.5903,
    "overlap": 4.293, "bound": 3.13,
}  # fmt: skip

# [21 features x 5 regimes], see moeopt.costmodel.correction_features.
CORRECTION: Final[tuple[float, ...]] = (
    -0.0311, -0.0518, 0.0547, -0.0021, 0.113, 0.0157, 0.0582, 0.00937, -0.00658, -0.0115, -0.0127, 0.0206, -0.0104,
    -0.0237, -0.0458, 0.00359, 0.0256, -0.0115, 0.017, -0.00282, -0.00328, 0.000833, -0.00818, 0.000892, 0.0458,
    0.00248, 0.00829, 0.00666, 0.00203, -0.00417, 0.0232, 0.0965, 0.0117, 0.00076, 0.0649, -0.0167, -0.00246,
    -0.0378, 0.002, 0.0708, 0.0488, -0.0392, 0.017, 0.0133, -0.0516, -0.0241, 0.0443, 0.0102, -0.0183, 0.0142,
    0.0127, 0.0219, -0.00301, 0.00055, -0.0181, -0.347, -1.11, 0.197, -0.0817, 0.439, -0.0115, -0.00041, -0.0114,
    -0.01, -0.00788, 0.0022, -0.0133, -0.00961, -0.00542, 0.0243, 0.00404, 0.0572, 0.0604, 0.0184, 0.0338, 0.00289,
    -0.0148, 0.0653, 0.00396, 0.00792, 0.0383, -0.106, 0.037, -0.0149, 0.114, -0.0251, 0.0672, -0.00855, -0.00113,
    0.00151, -0.0181, -0.0372, -0.0152, -0.00981, 0.0345, -0.0334, 0.0431, 0.00733, -0.0114, 0.0314, 0.00177,
    -0.0024, -0.0355, 0.00466, 0.0366,
)  # fmt: skip
