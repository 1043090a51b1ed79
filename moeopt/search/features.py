"""Launch configs and cells as points that a surrogate can measure distances between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.core.trial import Cell

if TYPE_CHECKING:
    from numpy.typing import NDArray

# No limit on registers behaves as a limit at the most that a thread can have.
_MOST_REGISTERS: Final = 255
_ROLE_NUMBER: Final = {"up": 0.0, "down": 1.0, "joint": 2.0}


def config_features(table: NDArray[np.int64]) -> NDArray[np.float64]:
    """Features of launch configs, float64 [configs, 11], on scales where 1 is a step of the lattice.

    The parameters in powers of two, and three of their combinations that decide on registers,
    shared memory and reuse: log2 of the tile's outputs per warp, of the pipeline's elements, and of
    the tile's aspect.

    Args:
        table: Of :func:`config_table`.
    """
    raw = table.astype(np.float64)
    m, n, k, group, warps = np.log2(raw[:, :5]).T
    stages = raw[:, 5]
    return np.stack(
        [
            m,
            n,
            k,
            group / 2,
            warps,
            stages * 0.7,
            m + n - warps,
            np.log2((raw[:, 0] + raw[:, 1]) * raw[:, 2] * stages),
            m - n,
            np.log2(np.where(raw[:, 6] > 0, raw[:, 6], _MOST_REGISTERS)) * 2,
            raw[:, 7] * 2,
        ],
        axis=1,
    )


def cell_features(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """log2 of the batch size and a number for the role, float64 [cells, 2]."""
    return np.array([(math.log2(c.batch_size), _ROLE_NUMBER[c.role]) for c in cells], dtype=np.float64)


def squash(excess: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compresses log(time / best) above 0.2, so that how bad a bad config is does not bend the model."""
    knee, scale = 0.2, 0.1
    over = np.maximum(excess - knee, 0.0)
    return np.asarray(np.minimum(excess, knee) + scale * np.log1p(over / scale), dtype=np.float64)
