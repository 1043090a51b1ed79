"""Tokens to experts as long as an engine's own alignment makes them.

The engine does not know on the host how many rows are in use, so it launches programs for a bound;
the bound is part of the time at small batch sizes and of what Triton specialises on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeopt.kernels.align import align, kept_with


def aligned_rows(num_pairs: int, num_experts: int, block_size_m: int, *, few_pairs_rule: bool = True) -> int:
    """Rows of an engine's sorted ids: each expert's run padded, or each pair's if there are fewer pairs.

    Args:
        num_pairs: M * top_k.
        num_experts: Runs that may need padding.
        block_size_m: Rows of one tile.
        few_pairs_rule: Whether the bound by pairs is used.
    """
    if few_pairs_rule and num_pairs < num_experts:
        return num_pairs * block_size_m
    return num_pairs + num_experts * (block_size_m - 1)


def align_to(
    topk_ids: Tensor, num_experts: int, block_size_m: int, rows: int, *, skip_absent: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`moeopt.kernels.align.align`, cut or padded to a number of rows.

    Args:
        topk_ids: [M, top_k], -1 for experts on another GPU.
        num_experts: Experts on this GPU.
        block_size_m: Rows of one tile.
        rows: Length of the sorted ids.
        skip_absent: Whether pairs of experts on another GPU get no tile at all.

    Returns:
        Sorted ids [rows], expert ids [ceil(rows / block_size_m)] and rows in use [1], all int32.
    """
    tiles = -(-rows // block_size_m)
    if topk_ids.is_meta:
        return tuple(torch.empty(n, dtype=torch.int32, device="meta") for n in (rows, tiles, 1))  # type: ignore[return-value]
    key = (num_experts, block_size_m, rows, skip_absent)
    return kept_with(topk_ids, key, lambda: _align_to(topk_ids, num_experts, block_size_m, rows, skip_absent))


def _align_to(
    topk_ids: Tensor, num_experts: int, block_size_m: int, rows: int, skip_absent: bool
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = -(-rows // block_size_m)
    aligned = align(topk_ids, num_experts, block_size_m)
    sorted_ids = torch.full((max(rows, aligned.sorted_ids.numel()),), topk_ids.numel(), dtype=torch.int32).to(
        topk_ids.device
    )
    expert_ids = torch.full((max(tiles, aligned.num_tiles),), -1, dtype=torch.int32).to(topk_ids.device)
    # Pairs of experts on another GPU come first.
    skipped = -(-int((topk_ids < 0).sum()) // block_size_m) if skip_absent else 0
    sorted_ids[: aligned.sorted_ids.numel() - skipped * block_size_m] = aligned.sorted_ids[skipped * block_size_m :]
    expert_ids[: aligned.num_tiles - skipped] = aligned.expert_ids[skipped:]
    return sorted_ids[:rows], expert_ids[:tiles], aligned.num_padded - skipped * block_size_m
