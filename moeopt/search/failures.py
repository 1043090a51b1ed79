"""Which configs are likely not to compile, from those that did not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


# A config that failed enters the surrogate as slower than the best by this (in the log): just enough that
# its neighbours lose the allure of the unknown.
FAILED_EXCESS: Final = 0.1
# How many successes right here a config counts for of which nothing is known nearby.
_CALM: Final = 0.3
# In steps of the lattice: how far a failure or a success speaks for its neighbours.
_REACH: Final = 1.7


def chance_to_compile(features: Floats, configs: Ints, failed: Ints, ran: Ints) -> Floats:
    """Chance of each config, float64 [len(configs)]: 1 where nothing failed nearby.

    Failures and successes are weighted by a Gaussian of their distance in steps of the lattice; a
    config that is far from both counts as one that compiles.

    Args:
        features: Of :func:`moeopt.search.features.config_features`, of all configs.
        configs: Indices of those asked about.
        failed: Indices of those that did not compile.
        ran: Indices of those that did.
    """
    if not len(failed):
        return np.ones(len(configs))

    here = features[configs]
    square = (here * here).sum(axis=1)[:, None]

    def near(others: Ints) -> Floats:
        there = features[others]
        squares = np.maximum(square + (there * there).sum(axis=1) - 2 * (here @ there.T), 0.0)
        return np.asarray(np.exp(-squares / (2 * _REACH**2)).sum(axis=1))

    bad, good = near(failed), near(ran)
    return np.asarray((good + _CALM) / (good + bad + _CALM))
