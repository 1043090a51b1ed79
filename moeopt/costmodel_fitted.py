"""Coefficients of the cost model, as ``benchmarks/costmodel.py --fit`` prints them.

Fitted on the 13 recordings of an NVIDIA H200 in ``studies/recordings`` (Triton 3.6.0; bf16, fp8, block fp8,
int8, int4), all there are: how it ranks a layer that it has not seen is in
``benchmarks/results/costmodel-cross.json`` (fitted on the others, judged on each in turn).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

FORMULA: Final[Mapping[str, float]] = {
    "wgmma": 1.027, "mma": 0.9933, "mma_fp8": 0.3041, "swapped": 0.9967, "l2_per_unit": 222.6, "l2": 12080.0,
    "shared": 273.3, "latency": 0.6408, "sync": 0.006767, "warps": 0.0406, "issue": 0.0406, "alone": 0.1353,
    "prologue": 2.017, "epilogue": 0.0406, "fill": 0.0406, "idle": 0.006791, "launch": 2.412, "dram": 0.9412,
    "short_loads": 0.5352, "short_dram": 0.1756, "block_scale": 0.7331, "dequantise": 2.273,
    "dequantise_wgmma": 2.038, "dequantise_groups": 1.331, "spill": 3.848, "whole_waves": 0.6574, "overlap": 5.437,
    "bound": 3.669,
}  # fmt: skip

# [21 features x 5 regimes], see moeopt.costmodel.correction_features.
CORRECTION: Final[tuple[float, ...]] = (
    0.0298, -0.163, 0.0527, -0.0341, 0.106, 0.00493, 0.0778, 0.0138, 0.00261, -0.00237, -0.0105, 0.00703, -0.0139,
    -0.0117, -0.0084, 0.00512, 0.0289, -0.00898, 0.019, -0.00458, 0.00479, -0.0115, -0.0165, 0.00586, 0.0436,
    -0.00336, 0.0137, 0.0161, -0.0013, 0.000343, 0.0243, 0.0936, 0.0286, -0.00524, 0.0129, -0.0254, -0.0175,
    -0.0209, -0.00277, 0.0786, 0.0392, -0.0129, 0.023, 0.0107, -0.0469, -0.0328, 0.0426, 0.0205, -0.00745, 0.0448,
    -0.0116, 0.0413, -0.00499, 0.0184, -0.0114, -0.0244, 0.669, -1.0, 0.33, -0.154, -0.00598, -0.0141, -0.0198,
    -0.000387, 0.0174, -0.00102, -0.00247, -0.00552, -0.00804, 0.0142, 0.0031, 0.038, 0.0354, 0.00869, -0.022,
    -0.0199, 0.0822, 0.0166, 0.0168, -0.0479, 0.0321, -0.105, 0.00864, 0.0106, 0.137, -0.021, 0.0672, -0.00528,
    0.00186, -0.0147, -0.0226, -0.0338, -0.0241, -0.00974, 0.00761, -0.023, 0.0255, 0.0133, -0.0164, 0.0228,
    -0.00397, 0.000457, -0.0485, 0.0104, 0.0242,
)  # fmt: skip
