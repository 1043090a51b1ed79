"""A Gaussian process over (launch config, cell): one model for all batch sizes and both roles.

The log time y of config c in cell z (role and log2 M) is modelled as prior mean plus a Gaussian process with the
covariance

    k((c, z), (c', z')) =  matern(c, c') [shared(z, z') + local(z, z')]     how the tile decides
                        +  [c = c'] own(z, z')                             what a config keeps for itself
                        +  level [z = z']                                  a cell's level, of which nothing is known
                        +  mean(z, z') m(c, z) m(c', z')                    how far the prior mean m is to be trusted
                        +  basis(z, z') b(c) . b(c')                        how recordings say that configs go together

Each part is a product of a function of the configs and one of the cells, so that what many cells cost is little more
than what one costs. With K the covariance of what was observed, plus the noise on its diagonal, and k the
covariance between a candidate and that, the posterior (Rasmussen and Williams, Gaussian Processes for Machine
Learning, algorithm 2.1) has

    mean = k' alpha,   alpha = K^-1 y,        covariance = k** - v' v,   v = L^-1 k,   K = L L'.

alpha is summed per (distinct config, cell) first: a candidate's mean is then one product of small matrices for all
cells. The hyperparameters are constants: fitting them in a tune gained less than it cost in code
(``benchmarks/results/ablation.md``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_ROOT3: Final = math.sqrt(3.0)
_LEVEL: Final = 1.0  # variance of a cell's level: wide, so that the data alone decide on it
_NOISE_FLOOR: Final = 1e-6  # variance that keeps the covariance well conditioned


@dataclass(frozen=True)
class CellKernel:
    """Covariance between cells: Matern-3/2 over log2 M, times a correlation between roles.

    Attributes:
        amplitude: Standard deviation, in the log of time.
        length: Of the Matern kernel, in doublings of M.
        between_roles: Correlation of up and down at the same M, 0 to 1.
    """

    amplitude: float
    length: float
    between_roles: float = 1.0

    def __call__(self, cells: Floats) -> Floats:
        """float64 [cells, cells], given [cells, 2] of log2 M and the role's number."""
        distance = _ROOT3 * np.abs(cells[:, :1] - cells[:, 0]) / self.length
        roles = np.where(cells[:, 1:] == cells[:, 1], 1.0, self.between_roles)
        return np.asarray(self.amplitude**2 * (1 + distance) * np.exp(-distance) * roles)


@dataclass(frozen=True)
class Hyperparameters:
    """Amplitudes (log of time) and lengths (features of a config, doublings of M).

    The values are near the medians of what marginal likelihood gives on recordings of an H200; the command that
    fits them is ``python -m benchmarks.hyperparameters``.

    Attributes:
        shared: What all batch sizes have in common of how the tile decides.
        local: What neighbouring batch sizes have in common.
        own: What one config keeps across cells.
        mean: The weight on the prior mean.
        basis: The weights on the basis.
        noise: Standard deviation of the noise.
        lengths: Of the config features, in the order of :func:`moeopt.search.features.config_features`.
    """

    shared: CellKernel
    local: CellKernel
    own: CellKernel
    mean: CellKernel
    basis: CellKernel
    noise: float
    lengths: tuple[float, ...]

    def length_of(self, features: int) -> Floats:
        """Lengths of so many features, float64 [features]; of one that no recording varies that of USE_TMA."""
        more = [self.lengths[-1]] * max(0, features - len(self.lengths))
        return np.array([*self.lengths[:features], *more])


# Features: BLOCK_SIZE_M, N, K, GROUP_SIZE_M, warps, stages; outputs per warp, elements of the pipeline, aspect of the
# tile; maxnreg, USE_TMA.
WITH_RECORDINGS: Final = Hyperparameters(
    shared=CellKernel(0.10, 9.3, 0.40),
    local=CellKernel(0.07, 2.2, 0.55),
    own=CellKernel(0.006, 3.4, 0.25),
    mean=CellKernel(0.43, 9.2),
    basis=CellKernel(1.3, 2.5, 0.43),
    noise=0.005,
    lengths=(4.2, 6.9, 1.7, 26.0, 7.2, 2.6, 11.4, 6.2, 9.2, 2.5, 2.0),
)
# Without a basis the other parts have to explain what it explains.
ALONE: Final = Hyperparameters(
    shared=CellKernel(0.23, 13.0, 0.45),
    local=CellKernel(0.12, 2.25, 0.62),
    own=CellKernel(0.02, 3.5, 0.27),
    mean=CellKernel(0.3, 4.0),
    basis=CellKernel(1.3, 2.5, 0.43),
    noise=0.012,
    lengths=(2.8, 6.5, 2.3, 30.0, 2.0, 3.4, 4.6, 7.0, 7.5, 2.5, 2.0),
)


class Surrogate:
    """Models log times of configs in cells around a prior mean.

    Args:
        configs: Config features, float64 [configs, features].
        cells: Cell features, float64 [cells, 2].
        prior: The prior mean, float64 [cells, configs].
        basis: float64 [configs, rank] (rank may be 0): :meth:`moeopt.search.prior.Prior.basis`.
        hyper: By default what was fitted with or without a basis.

    Attributes:
        log_likelihood: Of what :meth:`condition` was given last, up to a constant: what the hyperparameters are
            fitted by.
    """

    def __init__(
        self, configs: Floats, cells: Floats, prior: Floats, basis: Floats, hyper: Hyperparameters | None = None
    ) -> None:
        self.hyper = hyper or (WITH_RECORDINGS if basis.shape[1] else ALONE)
        self._scaled = configs / self.hyper.length_of(configs.shape[1])
        self._prior = prior
        self._basis = basis
        # Functions of the cells, float64 [cells, cells].
        self._tile = self.hyper.shared(cells) + self.hyper.local(cells)
        self._own = self.hyper.own(cells)
        self._mean = self.hyper.mean(cells)
        self._steady = self.hyper.basis(cells)

    def condition(self, config: Ints, cell: Ints, value: Floats) -> Floats:
        """Conditions on observations and returns the posterior mean, float64 [cells, configs].

        Args:
            config: Index of each observation's config, int64 [n].
            cell: Index of its cell, int64 [n].
            value: Its log time less the prior mean, float64 [n].
        """
        self._config, self._cell = config, cell
        distinct, self._where = np.unique(config, return_inverse=True)
        self._near = _matern(self._scaled, self._scaled[distinct])  # [configs, distinct]
        self._alike = self._basis @ self._basis[distinct].T  # [configs, distinct]
        covariance = self._cross(config, cell)
        covariance[np.diag_indices(len(config))] += self.hyper.noise**2 + _NOISE_FLOOR
        self._factor = cholesky(covariance, lower=True, check_finite=False)
        alpha = cho_solve((self._factor, True), value, check_finite=False)
        self.log_likelihood = -float(0.5 * value @ alpha + np.log(np.diag(self._factor)).sum())
        mass = np.zeros((len(distinct), len(self._tile)))
        np.add.at(mass, (self._where, cell), alpha)
        mean = self._near @ (mass @ self._tile) + self._alike @ (mass @ self._steady)
        mean[distinct] += mass @ self._own
        mean += _LEVEL * mass.sum(axis=0)
        pull = np.bincount(cell, self._prior[cell, config] * alpha, len(self._tile))
        mean += self._prior.T * (self._mean @ pull)
        return np.asarray(np.ascontiguousarray(mean.T))

    def covariances(self, shortlists: Sequence[Ints]) -> list[Floats]:
        """Posterior covariance of a shortlist of configs for every cell, float64 [n, n] each."""
        cells = np.repeat(np.arange(len(shortlists)), [len(s) for s in shortlists])
        cross = self._cross(np.concatenate(shortlists), cells)
        half = solve_triangular(self._factor, cross.T, lower=True, check_finite=False)
        parts = np.split(half, np.cumsum([len(s) for s in shortlists])[:-1], axis=1)
        return [
            self.prior_covariance(shortlist, cell) - part.T @ part
            for cell, (shortlist, part) in enumerate(zip(shortlists, parts, strict=True))
        ]

    def prior_covariance(self, configs: Ints, cell: int) -> Floats:
        """Covariance of configs in one cell before anything is observed, float64 [n, n]."""
        scaled, basis, prior = self._scaled[configs], self._basis[configs], self._prior[cell, configs]
        out = _matern(scaled, scaled) * self._tile[cell, cell] + np.eye(len(configs)) * self._own[cell, cell] + _LEVEL
        out += self._mean[cell, cell] * np.outer(prior, prior) + self._steady[cell, cell] * (basis @ basis.T)
        return np.asarray(out)

    def _cross(self, configs: Ints, cells: Ints) -> Floats:
        """Covariance of (config, cell) pairs, int64 [n] each, with what was observed: float64 [n, observations]."""
        out = _spread(self._near, configs, self._where)
        out *= _spread(self._tile, cells, self._cell)
        if self._basis.shape[1]:
            alike = _spread(self._alike, configs, self._where)
            alike *= _spread(self._steady, cells, self._cell)
            out += alike
        one, two = np.nonzero(configs[:, None] == self._config)
        out[one, two] += self._own[cells[one], self._cell[two]]
        out[cells[:, None] == self._cell] += _LEVEL
        weights = _spread(self._mean, cells, self._cell)
        weights *= np.outer(self._prior[cells, configs], self._prior[self._cell, self._config])
        out += weights
        return out


def _spread(matrix: Floats, rows: Ints, columns: Ints) -> Floats:
    """``matrix[rows][:, columns]``, gathered one axis at a time: several times faster than both at once."""
    return np.asarray(np.take(np.take(matrix, columns, axis=1), rows, axis=0))


def _matern(a: Floats, b: Floats) -> Floats:
    """Matern-3/2 of scaled features, float64 [len(a), len(b)]: (1 + r) exp(-r) with r = sqrt(3) |a - b|."""
    squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)
    r = _ROOT3 * np.sqrt(np.maximum(squares, 0.0))
    return np.asarray((1 + r) * np.exp(-r))
