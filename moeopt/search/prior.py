"""What is expected of every config in every cell before anything is timed.

A formula over the GPU's numbers, corrected by how far that formula was off in recordings of other
shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.gpu import GpuSpec
from moeopt.measure.base import Cell
from moeopt.search.features import squash
from moeopt.search.formula import formula_us
from moeopt.search.landscape import Landscape
from moeopt.shape import DTYPES, MoEShape

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

# How far apart two cells may be before one says little of the other: doublings of tokens per expert,
# and of the weight's rows and columns. A different dtype or GPU counts as this many such distances.
_TOKENS: Final = 0.7
_ROWS: Final = 2.0
_OTHER_DTYPE: Final = 1.2
_OTHER_GPU: Final = 1.2
# Weight of "the formula is right" against one recorded cell at distance 0.
_TRUST: Final = 0.15
_CORRECTION: Final = 0.8


@dataclass(frozen=True, eq=False)
class Prior:
    """Prior mean of the log time, up to a level per cell.

    Attributes:
        parts: What the mean is made of, float64 [cells, configs, parts]; each part has mean 0 over a
            cell's configs.
        mean: Its expected value, float64 [cells, configs].
    """

    parts: Floats
    mean: Floats


def make_prior(
    shape: MoEShape,
    gpu: GpuSpec,
    cells: Sequence[Cell],
    table: Ints,
    landscapes: Sequence[Landscape] = (),
) -> Prior:
    """The prior of a shape on a GPU.

    Args:
        shape: The layer.
        gpu: Where it runs.
        cells: What is tuned.
        table: The candidates, of :func:`moeopt.search.features.config_table`.
        landscapes: Recordings of other shapes, or none.
    """
    formula = _excess(np.log(formula_us(shape, gpu, cells, table)))
    parts = [_centred(formula)]
    weights = [1.0]
    if landscapes:
        parts.append(_correction(shape, gpu, cells, table, landscapes))
        weights.append(_CORRECTION)
    stacked = np.stack(parts, axis=2)
    return Prior(stacked, stacked @ np.array(weights))


def _excess(logs: Floats) -> Floats:
    return squash(logs - np.nanmin(logs, axis=1, keepdims=True))


def _centred(values: Floats) -> Floats:
    return np.asarray(values - np.nanmean(values, axis=1, keepdims=True))


def _correction(
    shape: MoEShape,
    gpu: GpuSpec,
    cells: Sequence[Cell],
    table: Ints,
    landscapes: Sequence[Landscape],
) -> Floats:
    """Weighted mean, over alike cells of recordings, of what the formula missed; float64 [cells, configs]."""
    total = np.zeros((len(cells), len(table)))
    weight = np.full_like(total, _TRUST)
    bits = DTYPES[shape.dtype].weight_bits
    for recorded in landscapes:
        landscape = recorded.joint() if cells[0].role == "joint" else recorded
        alike = alikeness(shape, gpu, cells, landscape)
        used = alike.max(axis=0, initial=0.0) > 1e-3
        if not used.any():
            continue
        there = [cell for cell, use in zip(landscape.cells, used, strict=True) if use]
        measured = _excess(np.log(landscape.us[used], dtype=np.float64))
        missed = _centred(
            measured - _excess(np.log(formula_us(landscape.shape, landscape.gpu, there, landscape.table)))
        )
        known = np.isfinite(missed)
        sums = alike[:, used] @ np.where(known, missed, 0.0)
        counts = alike[:, used] @ known.astype(np.float64)
        # BLOCK_SIZE_K as it is, and as the same number of bytes.
        for factor in sorted({1.0, bits / DTYPES[landscape.shape.dtype].weight_bits}):
            place = _nearest(table, landscape.table, factor)
            found = place >= 0
            total[:, found] += sums[:, place[found]]
            weight[:, found] += counts[:, place[found]]
    return total / weight


def alikeness(shape: MoEShape, gpu: GpuSpec, cells: Sequence[Cell], other: Landscape) -> Floats:
    """How much a recorded cell says of a tuned one: 1 for the same, towards 0; float64 [cells, recorded]."""
    fixed = (
        (_OTHER_DTYPE if (shape.dtype, shape.block_shape) != (other.shape.dtype, other.shape.block_shape) else 0.0) ** 2
        + (_OTHER_GPU if gpu.sm != other.gpu.sm else 0.0) ** 2
    )  # fmt: skip
    out = np.zeros((len(cells), len(other.cells)))
    for i, a in enumerate(cells):
        for j, b in enumerate(other.cells):
            if a.role == b.role:
                tokens = math.log2(_tokens_per_expert(shape, a) / _tokens_per_expert(other.shape, b)) / _TOKENS
                sides = [
                    math.log2(mine / theirs) / _ROWS
                    for role in a.roles
                    for mine, theirs in (
                        (shape.output_rows(role), other.shape.output_rows(role)),
                        (shape.reduction(role), other.shape.reduction(role)),
                    )
                ]
                squares = sum(s * s for s in sides) / len(a.roles)
                out[i, j] = math.exp(-(tokens * tokens + squares + fixed) / 2)
    return out


def _tokens_per_expert(shape: MoEShape, cell: Cell) -> float:
    return cell.batch_size * shape.top_k / (shape.num_experts * shape.ep_size)


def _nearest(table: Ints, recorded: Ints, factor: float) -> Ints:
    """For each config the recorded one nearest in every parameter, or -1 where that one is not there.

    Args:
        table: What is asked about.
        recorded: What there is; limits on registers and TMA are left out of account.
        factor: BLOCK_SIZE_K is multiplied by this first.
    """
    plain = np.flatnonzero((recorded[:, 6:] == 0).all(axis=1))
    have = recorded[plain, :6]
    values = [np.unique(column) for column in have.T]
    places = np.full([len(v) for v in values], -1, dtype=np.int64)
    places[tuple(np.searchsorted(v, column) for v, column in zip(values, have.T, strict=True))] = plain
    near = []
    for number, (column, there) in enumerate(zip(table[:, :6].T, values, strict=True)):
        asked, back = np.unique(column, return_inverse=True)
        scaled = asked * (factor if number == 2 else 1.0)
        near.append(np.abs(np.log2(scaled)[:, None] - np.log2(there)).argmin(axis=1)[back])
    return np.asarray(places[tuple(near)])
