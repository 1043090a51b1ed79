"""Shapes of every scheme, small enough for Triton's interpreter."""

from __future__ import annotations

from typing import Final

from moeopt.core.shape import MoEShape


def _shape(dtype: str, block_shape: tuple[int, int] | None = None, **more: object) -> MoEShape:
    return MoEShape(8, 2, 64, 64, dtype, block_shape, **more)  # type: ignore[arg-type]


CASES: Final = {
    "bf16": _shape("bf16"),
    "fp16": _shape("fp16"),
    "fp8 tensor": _shape("fp8_w8a8"),
    "fp8 channel": _shape("fp8_w8a8", per_channel=True),
    "fp8 block": _shape("fp8_w8a8", (32, 32)),
    "int8 channel": _shape("int8_w8a8", per_channel=True),
    "int8 block": _shape("int8_w8a8", (32, 32)),
    "w8a16 channel": _shape("int8_w8a16"),
    "w8a16 group": _shape("int8_w8a16", group_size=32),
    "w4a16 group": _shape("int4_w4a16", group_size=32),
    "expert parallel": _shape("bf16", ep_size=2),
    "expert parallel w4a16": _shape("int4_w4a16", group_size=32, ep_size=2),
    "odd sizes": MoEShape(5, 3, 48, 72),
    # Pairs are few among the experts: vLLM leaves sorting out.
    "many experts": MoEShape(64, 2, 64, 32, "fp8_w8a8", per_channel=True),
}
