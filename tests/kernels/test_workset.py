"""Graphs whose weights come from memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeopt.core.shape import MoEShape
from moeopt.kernels.work import expert_bytes
from moeopt.kernels.workset import COLD_FACTOR, LAUNCHES, MAX_LAUNCHES, make_workset

QWEN = MoEShape(256, 8, 3072, 256)
MIB = 2**20


def draw(shape: MoEShape, batch_size: int, seed: int = 0):
    def drawn(count: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        scores = rng.random((count, batch_size, shape.num_experts))
        return np.argsort(scores, axis=-1)[..., : shape.top_k].astype(np.int32)

    return drawn


def test_a_large_batch_is_left_as_it_was_drawn() -> None:
    drawn = draw(QWEN, 256)
    made = make_workset(drawn, QWEN, "up", 60 * MIB)
    assert made.cold and made.copies == 1
    np.testing.assert_array_equal(made.topk_ids, drawn(LAUNCHES))


@pytest.mark.parametrize(("l2", "role"), [(60, "up"), (60, "down"), (128, "up"), (128, "down")])
def test_one_token_meets_enough_different_weights_to_leave_l2(l2: int, role) -> None:
    made = make_workset(draw(QWEN, 1), QWEN, role, l2 * MIB)
    assert made.cold and made.copies == 1
    assert LAUNCHES <= len(made.topk_ids) <= MAX_LAUNCHES
    distinct = len(np.unique(made.topk_ids)) * expert_bytes(QWEN, role)
    assert distinct == made.distinct_bytes >= COLD_FACTOR * l2 * MIB
    # No launch meets what one of the launches before it left in L2.
    assert len(np.unique(made.topk_ids)) == made.topk_ids.size


def test_a_layer_that_fits_in_l2_is_copied() -> None:
    small = MoEShape(8, 2, 1024, 256)  # 8 MiB of W1
    made = make_workset(draw(small, 64), small, "up", 60 * MIB)
    assert made.copies == 15 and len(made.topk_ids) == 15 and made.cold
    limited = make_workset(draw(small, 64), small, "up", 60 * MIB, copies_allowed=2)
    assert limited.copies == 2 and not limited.cold


def test_a_warm_cache_repeats_one_routing() -> None:
    made = make_workset(draw(QWEN, 4), QWEN, "up", 0)
    assert not made.cold and made.copies == 1 and len(made.topk_ids) == LAUNCHES
    assert (made.topk_ids == made.topk_ids[0]).all()


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 64), top_k=st.integers(1, 8), tokens=st.integers(1, 40), seed=st.integers(0, 99),
    remote=st.booleans(),
)  # fmt: skip
def test_renaming_keeps_the_work(experts: int, top_k: int, tokens: int, seed: int, remote: bool) -> None:
    shape = MoEShape(experts, min(top_k, experts), 64, 64)
    base = draw(shape, tokens, seed)

    def drawn(count: int) -> np.ndarray:
        ids = base(count)
        return np.where(ids % 3 == 0, -1, ids).astype(np.int32) if remote else ids

    made = make_workset(drawn, shape, "up", 4 * MIB)
    before = drawn(len(made.topk_ids))
    assert made.topk_ids.dtype == np.int32
    for old, new in zip(before, made.topk_ids, strict=True):
        # As many tokens per expert, experts elsewhere untouched, a token's experts still distinct.
        assert sorted(np.bincount(old[old >= 0], minlength=experts)) == sorted(
            np.bincount(new[new >= 0], minlength=experts)
        )
        np.testing.assert_array_equal(old < 0, new < 0)
        for row in new:
            local = row[row >= 0]
            assert len(set(local.tolist())) == len(local)
