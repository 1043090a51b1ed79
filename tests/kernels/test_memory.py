"""GPU memory, planned without a GPU."""

from __future__ import annotations

import pytest

from moeopt.core.shape import DEFAULT_BATCH_SIZES, MoEShape
from moeopt.kernels.memory import memory_needed

QWEN = MoEShape(256, 8, 3072, 256)
GIB = 2**30


def test_one_layers_weights_are_held_once() -> None:
    need = memory_needed(QWEN, DEFAULT_BATCH_SIZES, l2_bytes=60 * 2**20)
    assert need.weights == 256 * 3 * 3072 * 256 * 2
    assert need.copies == 1
    assert need.largest_reference == 4096 * 8 * 3072 * 4
    assert need.output == 4096 * 8 * 3072 * 2
    assert need.least < need.total < 8 * GIB
    assert need.to_dict()["least"] == need.least


def test_more_tokens_need_more_and_a_layer_in_l2_needs_copies() -> None:
    assert memory_needed(QWEN, (64,)).least < memory_needed(QWEN, (16384,)).least
    small = MoEShape(8, 2, 1024, 256)
    cold = memory_needed(small, (64,), l2_bytes=128 * 2**20)
    assert cold.copies > 1 and cold.total > memory_needed(small, (64,)).total
    assert cold.least == pytest.approx(memory_needed(small, (64,)).least, rel=0.01)


def test_a_refusal_says_what_is_needed_free_and_held() -> None:
    need = memory_needed(MoEShape(256, 8, 7168, 2048), DEFAULT_BATCH_SIZES)
    line = need.refusal("NVIDIA GB10", 5 * GIB, ["sglang (pid 12) with 75.0 GiB"])
    assert "\n" not in line and "5.0 GiB of memory free" in line and "sglang (pid 12) with 75.0 GiB" in line
    assert f"{need.least / GIB:.1f} GiB are needed" in line
