"""Coefficients of the cost model, as ``benchmarks/costmodel.py --fit`` prints them.

Fitted on 2 recordings of an NVIDIA H200 (SGLang 0.5.23's kernel, Triton 3.6.0; bf16 and block fp8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FORMULA: Final[Mapping[str, float]] = {
    "wgmma": 5.139, "mma": 4.433, "mma_8bit": 0.06169, "swapped": 0.235, "l2_per_unit": 1808.0, "l2": 39650.0,
    "shared": 343.2, "latency": 0.6369, "sync": 0.002489, "warps": 0.01494, "issue": 0.01494, "alone": 0.04979,
    "prologue": 2.533, "epilogue": 0.01494, "fill": 1.182, "idle": 0.0004979, "launch": 0.8797, "dram": 0.9292,
    "short_loads": 1.421, "short_dram": 0.06081, "block_scale": 0.2567, "spill": 11.22, "whole_waves": 0.4747,
    "overlap": 1.82, "bound": 2.097,
}  # fmt: skip

# [21 features x 4 regimes], see moeopt.costmodel.correction_features.
CORRECTION: Final[tuple[float, ...]] = (
    0.0336, -0.0493, -0.0427, -0.000207, 0.00228, 0.00372, 0.0597, 0.00489, 0.000552, 0.0182, -0.0372, -0.00694,
    0.0116, 0.0185, -0.00732, 0.0118, -0.00591, -0.00781, 0.0234, 0.00691, 0.000357, 0.0196, -0.00331, 1.16e-05,
    0.0161, 0.0309, 0.0769, 0.00203, 0.0308, 0.018, 0.0542, 0.0151, -0.00661, 0.0113, 0.0499, 0.00245, -0.0179,
    -0.0394, -0.0234, -0.0261, 0.0112, 0.0334, -0.00987, 0.0157, 0.0643, 0.253, -0.432, -0.0354, -0.00507, 0.00308,
    -0.0213, 0.00151, 0.0072, -0.0124, -0.0136, 0.000545, 0.015, 0.0356, -0.0157, 0.00388, 0.00334, 0.00684,
    0.0341, 0.0193, 0.0281, -0.0171, -0.109, 0.0165, -0.0103, 0.0102, 0.0459, -0.000394, -0.0145, -0.0151, -0.0421,
    -0.00939, -0.0109, 0.0186, -0.0102, -0.00286, 0.0127, 0.00459, -0.0618, 0.0129,
)  # fmt: skip
