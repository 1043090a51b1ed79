"""Small shapes of every dtype and scheme."""

from __future__ import annotations

from typing import Any

from moeopt.core.shape import MoEShape

SCHEMES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": "fp16"},
    "fp8-tensor": {"dtype": "fp8_w8a8"},
    "fp8-channel": {"dtype": "fp8_w8a8", "per_channel": True},
    "fp8-block": {"dtype": "fp8_w8a8", "block_shape": (32, 32)},
    "fp8-wide-block": {"dtype": "fp8_w8a8", "block_shape": (64, 64)},
    "fp8-narrow-block": {"dtype": "fp8_w8a8", "block_shape": (16, 32)},
    "int8-tensor": {"dtype": "int8_w8a8"},
    "int8-channel": {"dtype": "int8_w8a8", "per_channel": True},
    "int8-block": {"dtype": "int8_w8a8", "block_shape": (32, 32)},
    "int8-weights": {"dtype": "int8_w8a16"},
    "int8-weights-channel": {"dtype": "int8_w8a16", "per_channel": True},
    "int8-weights-group": {"dtype": "int8_w8a16", "group_size": 32},
    "int4-group-16": {"dtype": "int4_w4a16", "group_size": 16},
    "int4-group-32": {"dtype": "int4_w4a16", "group_size": 32},
}


def small_shape(scheme: str, **changes: Any) -> MoEShape:
    """5 experts, 2 per token, K 96, N 64, unless changed."""
    sizes: dict[str, Any] = {"num_experts": 5, "top_k": 2, "hidden_size": 96, "intermediate_size": 64}
    return MoEShape(**{**sizes, **SCHEMES[scheme], **changes})
