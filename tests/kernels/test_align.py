"""Tokens to experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeopt.kernels.align import align, max_tiles


def check(ids: torch.Tensor, experts: int, block: int) -> None:
    aligned = align(ids, experts, block)
    pairs = ids.numel()
    used = int(aligned.num_padded)
    assert aligned.num_tiles == max_tiles(pairs, experts, block)
    assert aligned.sorted_ids.shape == (aligned.num_tiles * block,)
    assert used % block == 0 and used <= aligned.num_tiles * block
    assert all(t.dtype == torch.int32 for t in (aligned.sorted_ids, aligned.expert_ids, aligned.num_padded))
    real = aligned.sorted_ids[aligned.sorted_ids < pairs]
    assert sorted(real.tolist()) == list(range(pairs))
    assert bool((aligned.sorted_ids[used:] == pairs).all())
    flat = ids.flatten()
    for tile in range(used // block):
        rows = aligned.sorted_ids[tile * block : (tile + 1) * block]
        inside = rows[rows < pairs].long()
        assert inside.numel() > 0
        assert bool((flat[inside] == aligned.expert_ids[tile]).all())
    # No more tiles than each expert's run needs.
    assert used == sum(-(-int((flat == e).sum()) // block) * block for e in range(-1, experts))


@given(
    data=st.data(),
    experts=st.integers(1, 40),
    tokens=st.integers(1, 30),
    top_k=st.integers(1, 6),
    block=st.sampled_from([1, 16, 32, 64]),
)
def test_every_pair_once_in_a_tile_of_its_expert(
    data: st.DataObject, experts: int, tokens: int, top_k: int, block: int
) -> None:
    flat = data.draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k))
    check(torch.tensor(flat, dtype=torch.int32).view(tokens, top_k), experts, block)


@pytest.mark.parametrize("fill", [-1, 0, 1023])
def test_one_expert_takes_all(fill: int) -> None:
    check(torch.full((70, 8), fill, dtype=torch.int32), 1024, 64)


def test_pairs_without_an_expert_here_come_first() -> None:
    aligned = align(torch.tensor([[1, -1], [0, -1]]), 2, 2)
    assert aligned.expert_ids.tolist()[:3] == [-1, 0, 1]
    assert aligned.sorted_ids.tolist()[:6] == [1, 3, 2, 4, 0, 4]


def test_tiles_are_as_many_as_sglang_launches() -> None:
    assert max_tiles(8, 256, 16) == 8  # fewer pairs than experts: one tile each at most
    assert max_tiles(512, 256, 16) == -(-(512 + 257 * 15) // 16)
