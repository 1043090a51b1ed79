"""Tokens to experts: which rows of the output each program computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")
_kept: Any = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Alignment:
    """(token, expert) pairs sorted by expert, each expert's run padded to whole tiles.

    The layout is the one that SGLang's and vLLM's kernels read.

    Attributes:
        block_size_m: Rows of one tile.
        sorted_ids: [tiles * block_size_m] int32: index of the pair in ``topk_ids.flatten()``; padding
            holds the number of pairs.
        expert_ids: [tiles] int32: the tile's expert; -1 where its pairs' experts are on another GPU.
        num_padded: [1] int32: rows in use, a multiple of block_size_m; tiles beyond do nothing.
    """

    block_size_m: int
    sorted_ids: Tensor
    expert_ids: Tensor
    num_padded: Tensor

    @property
    def num_tiles(self) -> int:
        """Tiles along M that are launched, those that do nothing included."""
        return int(self.expert_ids.shape[0])


def max_tiles(num_pairs: int, num_experts: int, block_size_m: int) -> int:
    """Tiles along M that an engine launches: it does not know on the host how many are in use.

    SGLang 0.5.23's bound: every expert's run may need a padded tile, one more for the pairs without
    an expert here; with fewer pairs than that, every pair may.
    """
    rows = num_pairs + (num_experts + 1) * (block_size_m - 1)
    if num_pairs < num_experts + 1:
        rows = num_pairs * block_size_m
    return -(-rows // block_size_m)


def align(topk_ids: Tensor, num_experts: int, block_size_m: int) -> Alignment:
    """Sorts the pairs by expert and pads each expert's run to a multiple of block_size_m.

    Pairs of experts on another GPU (-1) come first, in tiles whose expert is -1: kernels write zeros
    there and multiply nothing. Runs on the ids' device without waiting for it.

    Args:
        topk_ids: [M, top_k] int32, -1 to num_experts - 1.
        num_experts: Experts on this GPU.
        block_size_m: Rows of one tile.
    """
    ids = topk_ids.flatten().long() + 1
    pairs, device = ids.numel(), ids.device
    tiles = max_tiles(pairs, num_experts, block_size_m)
    ordered, pair = torch.sort(ids, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    padded = (counts + block_size_m - 1) // block_size_m * block_size_m
    ends = padded.cumsum(0)
    # A pair's row: where its expert's run begins, plus its rank within the run.
    rank = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[ordered]
    sorted_ids = torch.full((tiles * block_size_m,), pairs, dtype=torch.int32, device=device)
    sorted_ids[(ends - padded)[ordered] + rank] = pair.to(torch.int32)
    first_rows = torch.arange(tiles, device=device) * block_size_m
    expert_ids = torch.searchsorted(ends, first_rows, right=True).clamp_max(num_experts) - 1
    return Alignment(block_size_m, sorted_ids, expert_ids.to(torch.int32), ends[-1:].to(torch.int32))


def kept_with(topk_ids: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` gives, made once for a tensor and key and kept for as long as the tensor lives.

    Hundreds of configs are launched over the same routed tokens. The ids must not be changed in place.
    """
    of_tensor: dict[Hashable, Any] = _kept.setdefault(topk_ids, {})
    if key not in of_tensor:
        of_tensor[key] = make()
    found: T = of_tensor[key]
    return found
