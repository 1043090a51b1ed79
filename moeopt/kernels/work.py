"""Work of one launch: which experts it visits, the bytes that it moves, the operations that it does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeopt.core.shape import MoEShape, Role

# Outputs are bf16 or fp16 whatever the scheme.
_OUTPUT_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class Visits:
    """What a batch meets of the experts on this GPU.

    Attributes:
        experts: How many of them are visited.
        pairs: (token, expert) pairs whose expert is among them.
    """

    experts: float
    pairs: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch has to do at least.

    Attributes:
        bytes: Visited experts' weights once, activations, outputs.
        flops: Two per multiply-add.
    """

    bytes: float
    flops: float


def expected_visits(shape: MoEShape, batch_size: int) -> Visits:
    """Mean over uniform routing, as :meth:`moeopt.kernels.routing.Routing.draw` has it.

    Each of the M tokens visits the S shared experts, which every rank has, and top_k - S distinct experts of the
    routed ones of all ranks. A routed expert is missed by one token with probability 1 - share, so that it is visited
    with 1 - (1 - share)^M.
    """
    share, shared = routed_share(shape), shape.shared_experts
    missed = float(np.exp(batch_size * np.log1p(-share))) if share < 1.0 else 0.0
    routed = shape.num_experts - shared
    return Visits(shared + routed * (1.0 - missed), batch_size * (shared + routed * share))


def routed_share(shape: MoEShape) -> float:
    """Probability that a token visits a given routed expert, if all are as likely: 0 where there are none."""
    routed = (shape.num_experts - shape.shared_experts) * shape.ep_size
    return min(1.0, (shape.top_k - shape.shared_experts) / routed) if routed else 0.0


def counted_visits(topk_ids: NDArray[np.int32], num_experts: int) -> Visits:
    """Mean over drawn routings.

    Args:
        topk_ids: [launches, M, top_k]; ids outside 0 to E - 1 are of experts on other GPUs.
        num_experts: E.
    """
    here = (topk_ids >= 0) & (topk_ids < num_experts)
    experts = np.mean([np.unique(ids[mine]).size for ids, mine in zip(topk_ids, here, strict=True)])
    return Visits(float(experts), float(here.sum()) / len(topk_ids))


def launch_work(shape: MoEShape, role: Role, batch_size: int, visits: Visits | None = None) -> Work:
    """Bytes and operations of one launch.

    Rows of all pairs are written: where an expert is on another GPU, they are zeros.

    Args:
        shape: The layer.
        role: Which projection.
        batch_size: M.
        visits: Of this batch; None for :func:`expected_visits`.
    """
    visits = visits or expected_visits(shape, batch_size)
    tokens = batch_size if role == "up" else visits.pairs
    weights = visits.experts * expert_bytes(shape, role)
    moved = weights + activation_bytes(shape, role, tokens) + output_bytes(shape, role, batch_size)
    return Work(moved, 2.0 * visits.pairs * shape.output_rows(role) * shape.reduction(role))


def expert_bytes(shape: MoEShape, role: Role) -> float:
    """Bytes of one expert's weight of one role, scales included."""
    size = shape.output_rows(role) * shape.reduction(role) * shape.spec.weight_bits / 8
    scales = shape.scale_shape(role)
    return size if scales is None else size + (2 if shape.scales == "group" else 4) * math.prod(scales)


def activation_bytes(shape: MoEShape, role: Role, tokens: float) -> float:
    """Bytes of so many rows of a role's activations, without their scales."""
    return tokens * shape.reduction(role) * shape.spec.activation_bits / 8


def output_bytes(shape: MoEShape, role: Role, batch_size: int) -> int:
    """Bytes of a role's output, [M * top_k, rows]."""
    return batch_size * shape.top_k * shape.output_rows(role) * _OUTPUT_BYTES
