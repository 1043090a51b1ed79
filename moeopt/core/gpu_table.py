"""GPUs by name: what their data sheets say, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_PRO: Final = "NVIDIA RTX PRO 6000 Blackwell"

# Name as torch reports it, compute capability, SMs, MiB of L2, GiB, GB/s, dense TFLOP/s of bf16 and fp8, TOP/s of
# int8 (vendor's data sheets; unified memory last). With fp32 accumulation, which GeForce cards do at half the rate.
# RTX PRO: SMs x 1,024 FLOP x boost clock (RTX PRO 6000: 2.43, 2.617 and 2.28 GHz), RTX PRO 5000: an eighth of its
# sparse FP4 rate. GB10: a half and a quarter of its dense FP4 rate, the only one published. GB200, GB300: a 72nd of
# NVL72's. Where nvidia-smi shows less memory than the data sheet (B300, GB200, GB300, GH200 144G), that.
ROWS: Final[tuple[tuple[Any, ...], ...]] = (
    (f"{_PRO} Server Edition", (12, 0), 188, 128, 96, 1597, 468, 936, 936),
    (f"{_PRO} Workstation Edition", (12, 0), 188, 128, 96, 1792, 504, 1008, 1008),
    (f"{_PRO} Max-Q Workstation Edition", (12, 0), 188, 128, 96, 1792, 439, 878, 878),
    ("NVIDIA RTX PRO 5000 Blackwell", (12, 0), 110, 96, 48, 1344, 258, 516, 516),
    ("NVIDIA RTX PRO 5000 72GB Blackwell", (12, 0), 110, 96, 72, 1344, 258, 516, 516),
    ("NVIDIA RTX PRO 4500 Blackwell", (12, 0), 82, 64, 32, 896, 220, 440, 440),
    ("NVIDIA RTX PRO 4000 Blackwell", (12, 0), 70, 48, 24, 672, 188, 375, 375),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 32, 1792, 210, 419, 838),
    ("NVIDIA GeForce RTX 5080", (12, 0), 84, 64, 16, 960, 113, 225, 450),
    ("NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 48, 16, 896, 88, 176, 352),
    ("NVIDIA GB10", (12, 1), 48, 24, 128, 273, 125, 250, 250, True),
    ("NVIDIA B300 SXM6 AC", (10, 3), 148, 126, 268, 8000, 2250, 4500, 150),
    ("NVIDIA GB300", (10, 3), 152, 115, 277, 8000, 2500, 5000, 165),
    ("NVIDIA B200", (10, 0), 148, 126, 180, 7700, 2250, 4500, 4500),
    ("NVIDIA GB200", (10, 0), 152, 126, 185, 8000, 2500, 5000, 5000),
    ("NVIDIA H200", (9, 0), 132, 60, 141, 4800, 989, 1979, 1979),
    ("NVIDIA H200 NVL", (9, 0), 132, 60, 141, 4800, 835, 1671, 1671),
    ("NVIDIA GH200 480GB", (9, 0), 132, 60, 96, 4000, 989, 1979, 1979),
    ("NVIDIA GH200 144G HBM3e", (9, 0), 132, 60, 142, 4900, 989, 1979, 1979),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 80, 3350, 989, 1979, 1979),
    ("NVIDIA H100 NVL", (9, 0), 132, 60, 94, 3900, 835, 1671, 1671),
    ("NVIDIA H100 PCIe", (9, 0), 114, 50, 80, 2000, 756, 1513, 1513),
    ("NVIDIA H800", (9, 0), 132, 50, 80, 3350, 989, 1979, 1979),
    ("NVIDIA H800 PCIe", (9, 0), 114, 50, 80, 2000, 756, 1513, 1513),
    ("NVIDIA H20", (9, 0), 78, 60, 96, 4000, 148, 296, 296),
    ("NVIDIA H20-3e", (9, 0), 78, 60, 141, 4917, 148, 296, 296),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 80, 2039, 312, 0, 624),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40, 40, 1555, 312, 0, 624),
    ("NVIDIA A100 80GB PCIe", (8, 0), 108, 40, 80, 1935, 312, 0, 624),
    ("NVIDIA A100-PCIE-40GB", (8, 0), 108, 40, 40, 1555, 312, 0, 624),
    ("NVIDIA A800-SXM4-80GB", (8, 0), 108, 40, 80, 2039, 312, 0, 624),
    ("NVIDIA A800 80GB PCIe", (8, 0), 108, 40, 80, 1935, 312, 0, 624),
    ("NVIDIA A30", (8, 0), 56, 24, 24, 933, 165, 0, 330),
    ("NVIDIA A10", (8, 6), 72, 6, 24, 600, 125, 0, 250),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 24, 936, 71, 0, 284),
    ("NVIDIA L40S", (8, 9), 142, 96, 48, 864, 362, 733, 733),
    ("NVIDIA L40", (8, 9), 142, 96, 48, 864, 181, 362, 362),
    ("NVIDIA L20", (8, 9), 92, 96, 48, 864, 119.5, 239, 239),
    ("NVIDIA L4", (8, 9), 58, 48, 24, 300, 121, 242, 242),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 96, 48, 960, 364, 728, 728),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 24, 1008, 165, 330, 660),
    ("NVIDIA GeForce RTX 4090 D", (8, 9), 114, 72, 24, 1008, 147, 294, 588),
)  # fmt: skip

# Other names of some of them, in lower case.
ALIASES: Final[Mapping[str, str]] = {
    "h100": "NVIDIA H100 80GB HBM3",
    "a100": "NVIDIA A100-SXM4-80GB",
    "b300": "NVIDIA B300 SXM6 AC",
    "dgx spark": "NVIDIA GB10",
    "rtx 6000 ada": "NVIDIA RTX 6000 Ada Generation",
}

# SMs of a MIG instance by its (compute slices, memory slices), as `nvidia-smi mig -lgip` shows them.
Slices = Mapping[tuple[int, int], int]
_A100: Final[Slices] = {(1, 1): 14, (1, 2): 14, (2, 2): 28, (3, 4): 42, (4, 4): 56, (7, 8): 98}
_H100: Final[Slices] = {(1, 1): 16, (1, 2): 26, (2, 2): 32, (3, 4): 60, (4, 4): 64, (7, 8): 132}
_RTX_PRO_6000: Final[Slices] = {(1, 1): 46, (2, 2): 94, (4, 4): 188}
MIG_MULTIPROCESSORS: Final[Mapping[str, Slices]] = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A30": {(1, 1): 14, (2, 2): 28, (4, 4): 56},
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _H100,
    f"{_PRO} Server Edition": _RTX_PRO_6000,
    f"{_PRO} Workstation Edition": _RTX_PRO_6000,
    f"{_PRO} Max-Q Workstation Edition": _RTX_PRO_6000,
}

# Boards as names of virtual GPUs spell them, where that is another spelling than torch's.
VGPU_BOARDS: Final[Mapping[str, str]] = {
    "a100": "NVIDIA A100-PCIE-40GB",
    "a100x": "NVIDIA A100-SXM4-40GB",
    "a100d": "NVIDIA A100 80GB PCIe",
    "a100dx": "NVIDIA A100-SXM4-80GB",
    "a800d": "NVIDIA A800 80GB PCIe",
    "a800dx": "NVIDIA A800-SXM4-80GB",
    "h100": "NVIDIA H100 PCIe",
    "h100l": "NVIDIA H100 NVL",
    "h100xm": "NVIDIA H100 80GB HBM3",
    "h800": "NVIDIA H800 PCIe",
    "h800xm": "NVIDIA H800",
    "h200": "NVIDIA H200 NVL",
    "h200x": "NVIDIA H200",
    "h20x": "NVIDIA H20-3e",
}
