"""Prior of a search: what is expected of every config in every cell before anything is timed.

The cost model's time, corrected where there are recordings to learn from and the architecture is theirs; and which
configs tend to be off together, from what its formula misses in recordings of other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.trial import Cell
from moeopt.costmodel.model import predict_table_us
from moeopt.recordings.landscape import Landscape
from moeopt.search.features import squash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

# How many directions of the residuals are kept.
_RANK: Final = 128
# Above so many candidates those that stand at the same recorded configs are looked at once.
_MANY: Final = 4096


@dataclass(frozen=True, eq=False)
class Prior:
    """Prior mean of the log time, up to a level per cell.

    Attributes:
        mean: Its expected value, float64 [cells, configs].
        residuals: What the formula misses in recordings; None where there is none.
    """

    mean: Floats
    residuals: CostModelResiduals | None

    def basis(self, configs: Ints) -> Floats:
        """Vectors whose products are the covariance, between configs, of what the formula misses in a cell.

        Up to a level, which is taken out over the configs that are asked for.

        Args:
            configs: Columns of ``mean``.

        Returns:
            float64 [len(configs), rank]; of rank 0 without recordings.
        """
        return np.zeros((len(configs), 0)) if self.residuals is None else self.residuals.basis(configs)


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
        table: The candidates, of :func:`moeopt.core.config.config_table`.
        landscapes: Recordings of other shapes; without any the cost model's formula is not corrected, either.
    """
    us = expected_us(shape, gpu, cells, table, corrected=bool(landscapes))
    return Prior(_centred(_excess(np.log(us))), _residuals(shape, cells, table, landscapes))


def expected_us(
    shape: MoEShape, gpu: GpuSpec, cells: Sequence[Cell], table: Ints, *, corrected: bool = False
) -> Floats:
    """The cost model's microseconds of one launch, float64 [cells, configs]; in joint mode of both.

    Args:
        shape: The layer.
        gpu: Its limits and data-sheet rates.
        cells: Roles and batch sizes.
        table: Of :func:`moeopt.core.config.config_table`.
        corrected: By what was fitted on recordings of other shapes.
    """
    out = np.zeros((len(cells), len(table)))
    for role in ROLES:
        mine = [i for i, cell in enumerate(cells) if role in cell.roles]
        if mine:
            sizes = [cells[i].batch_size for i in mine]
            out[mine] += predict_table_us(shape, gpu, role, sizes, table.astype(float), corrected=corrected)
    return out


def _excess(logs: Floats) -> Floats:
    return squash(logs - np.nanmin(logs, axis=1, keepdims=True))


def _centred(values: Floats) -> Floats:
    return np.asarray(values - np.nanmean(values, axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class CostModelResiduals:
    """What the formula misses in recorded cells, at the candidates' places.

    A row is a recorded cell; a recording of another width of weights has two for each (see :func:`_residuals`).

    Attributes:
        recorded: log(measured / formula), up to a level per row; NaN where not known; float64 [rows, configs] of
            each recording.
        places: For each of ``recorded``, the recorded config that stands for a column, or -1; int64 [columns].
        column: The column of each candidate, int64 [candidates].
        weight: How much each row counts, float64 [rows]: 1, or a half where a recorded cell has two.
    """

    recorded: tuple[Floats, ...]
    places: tuple[Ints, ...]
    column: Ints
    weight: Floats

    def basis(self, candidates: Ints) -> Floats:
        """See :meth:`Prior.basis`."""
        columns, back = np.unique(self.column[candidates], return_inverse=True)
        parts = []
        for recorded, places in zip(self.recorded, self.places, strict=True):
            place = places[columns]
            parts.append(np.where(place >= 0, recorded[:, place], np.nan))
        stacked = np.concatenate(parts)
        known = np.isfinite(stacked)
        missed = np.where(known, stacked, 0.0)
        missed -= known * (missed.sum(axis=1, keepdims=True) / np.maximum(known.sum(axis=1, keepdims=True), 1))
        missed *= np.sqrt(self.weight / self.weight.sum())[:, None]
        # The right singular vectors, times the singular values.
        values, vectors = np.linalg.eigh(missed @ missed.T)
        most = vectors[:, values > 1e-9 * values[-1]][:, -_RANK:]
        return np.asarray(missed.T @ most)[back]


def _residuals(
    shape: MoEShape, cells: Sequence[Cell], table: Ints, landscapes: Sequence[Landscape]
) -> CostModelResiduals | None:
    bits = shape.spec.weight_bits
    used = [recorded.joint() if cells[0].role == "joint" else recorded for recorded in landscapes]
    used = [landscape for landscape in used if landscape.cells]
    if not used:
        return None
    recorded, places, weights = [], [], []
    for landscape in used:
        measured = _excess(np.log(landscape.us, dtype=np.float64))
        formula = _excess(np.log(expected_us(landscape.shape, landscape.gpu, landscape.cells, landscape.table)))
        missed = _centred(measured - formula)
        # BLOCK_SIZE_K as it is, and as the same number of bytes.
        factors = sorted({1.0, bits / landscape.shape.spec.weight_bits})
        for factor in factors:
            recorded.append(missed)
            places.append(_nearest(table, landscape.table, factor))
            weights.append(np.full(len(missed), 1.0 / len(factors)))
    column = np.arange(len(table))
    if len(table) > _MANY:
        distinct, column = np.unique(np.stack(places), axis=1, return_inverse=True)
        places = list(distinct)
    return CostModelResiduals(tuple(recorded), tuple(places), column.ravel(), np.concatenate(weights))


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
