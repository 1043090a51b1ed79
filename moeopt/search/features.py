"""Launch configs and cells as points that a surrogate can measure distances between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt.core.config import PARAMETERS
from moeopt.core.trial import Cell

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROLE_NUMBER: Final = {"up": 0.0, "down": 1.0, "joint": 2.0}


def config_features(table: NDArray[np.int64]) -> NDArray[np.float64]:
    """Features of launch configs, float64 [configs, 11], on scales where 1 is about a step of the grid.

    The parameters, most in powers of two, and three of their combinations that decide on registers,
    shared memory and reuse: log2 of the tile's outputs per warp, of the pipeline's elements, and of
    the tile's aspect. The parameters that every config has come first, then the combinations, then the others.

    Args:
        table: Of :func:`moeopt.core.config.config_table`.
    """
    raw = dict(zip(PARAMETERS, table.astype(np.float64).T, strict=True))
    columns = {key: row.feature(raw[key]) for key, row in PARAMETERS.items()}
    m, n, k = raw["BLOCK_SIZE_M"], raw["BLOCK_SIZE_N"], raw["BLOCK_SIZE_K"]
    combinations = [np.log2(m * n / raw["num_warps"]), np.log2((m + n) * k * raw["num_stages"]), np.log2(m / n)]
    required = [columns[key] for key, row in PARAMETERS.items() if row.required]
    others = [columns[key] for key, row in PARAMETERS.items() if not row.required]
    return np.stack([*required, *combinations, *others], axis=1)


def cell_features(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """log2 of the batch size and a number for the role, float64 [cells, 2]."""
    return np.array([(math.log2(c.batch_size), _ROLE_NUMBER[c.role]) for c in cells], dtype=np.float64)


def squash(excess: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compresses log(time / best) above 0.2, so that how bad a bad config is does not bend the model."""
    knee, scale = 0.2, 0.1
    over = np.maximum(excess - knee, 0.0)
    return np.asarray(np.minimum(excess, knee) + scale * np.log1p(over / scale), dtype=np.float64)
