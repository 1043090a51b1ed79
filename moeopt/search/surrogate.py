"""A Gaussian process over (launch config, cell): one model for all batch sizes and both roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_ROOT3: Final = math.sqrt(3.0)
_LEVEL: Final = 1.0  # variance of a cell's level: wide, so that the data alone decide on it
_SPREAD: Final = 0.25  # standard deviation of the prior on every hyperparameter (in logs)


@dataclass
class Hyperparameters:
    """Logs of amplitudes and lengths, logits of correlations; fitted by marginal likelihood.

    ``theta`` holds, in order: amplitudes of what all cells share, of what neighbouring batch sizes
    share, of what one config keeps across cells, and of the noise; lengths of the config features;
    lengths over log2 M of the three; correlations between roles of the three; amplitude and length
    over log2 M of the weight on the prior mean; amplitude, length over log2 M and correlation
    between roles of the weights on the basis.
    """

    theta: Floats
    features: int

    @classmethod
    def default(cls, features: int, *, basis: bool = False) -> Hyperparameters:
        """Near the medians of what marginal likelihood gave on recordings of an H200.

        Args:
            features: How many config features there are.
            basis: Whether there is one: it explains most of what the others have to explain without it.
        """
        if basis:
            amplitudes, over_m, roles = [0.1, 0.07, 0.006, 0.005], [9.3, 2.2, 3.4], [-0.4, 0.2, -1.1]
            lengths, weights = [4.2, 6.9, 1.7, 26.0, 7.2, 2.6, 11.4, 6.2, 9.2, 2.5, 2.0], [0.43, 9.2]
        else:
            amplitudes, over_m, roles = [0.23, 0.12, 0.02, 0.012], [13.0, 2.25, 3.5], [-0.2, 0.5, -1.0]
            lengths, weights = [2.8, 6.5, 2.3, 30.0, 2.0, 3.4, 4.6, 7.0, 7.5, 2.5, 2.0], [0.3, 4.0]
        # A feature that the recordings do not vary has a length of its own scale.
        lengths += [2.0] * (features - len(lengths))
        logs = [*amplitudes, *lengths[:features], *over_m]
        return cls(np.concatenate([np.log(logs), roles, np.log([*weights, 1.3, 2.5]), [-0.3]]), features)

    @property
    def variances(self) -> Floats:
        """Of the shared part, the local part, the config's own, and the noise."""
        return np.asarray(np.exp(2 * self.theta[:4]))

    @property
    def lengths(self) -> Floats:
        """Of the config features."""
        return np.asarray(np.exp(self.theta[4 : 4 + self.features]))

    def cell_kernel(self, part: int) -> tuple[float, float]:
        """Length over log2 M and correlation between roles of one of the three parts."""
        at = 4 + self.features + part
        return math.exp(self.theta[at]), 1 / (1 + math.exp(-self.theta[at + 3]))

    @property
    def weight_kernel(self) -> tuple[float, float]:
        """Variance and length over log2 M of the weight on the prior mean."""
        return math.exp(2 * self.theta[-5]), math.exp(self.theta[-4])

    @property
    def basis_kernel(self) -> tuple[float, float, float]:
        """Variance, length over log2 M and correlation between roles of the weights on the basis."""
        return math.exp(2 * self.theta[-3]), math.exp(self.theta[-2]), 1 / (1 + math.exp(-self.theta[-1]))


class Surrogate:
    """Models log times of configs in cells around a prior mean.

    The covariance of two (config, cell) is a sum of products: a Matern-3/2 kernel of the config
    features times one over cells (log2 M and role), once with a long and once with a short reach
    over M; what a config keeps for itself over cells; a level per cell; an uncertain weight on the
    prior mean; and uncertain weights on a basis, in which recordings say how configs differ from what
    is expected of them. As every part is a product, what many cells cost
    is little more than what one costs.

    Args:
        configs: Config features, float64 [configs, features].
        cells: Cell features, float64 [cells, 2].
        prior: The prior mean, float64 [cells, configs].
        basis: float64 [configs, rank] (rank may be 0): :meth:`moeopt.search.prior.Prior.basis`.
    """

    def __init__(self, configs: Floats, cells: Floats, prior: Floats, basis: Floats) -> None:
        self.x = configs
        self.z = cells
        self.prior = prior
        self.basis = basis
        self.hyper = Hyperparameters.default(configs.shape[1], basis=bool(basis.shape[1]))
        self._start = self.hyper.theta.copy()

    # -- data ---------------------------------------------------------------------------------------

    def observe(self, config: Ints, cell: Ints, value: Floats) -> None:
        """Takes all observations (index of config and of cell, log time less the prior mean)."""
        self.config, self.cell, self.value = config, cell, value

    def fit(self, rng: np.random.Generator, most: int = 96, steps: int = 5) -> None:
        """Fits the hyperparameters to at most ``most`` of the observations."""
        config, cell, value = self.config, self.cell, self.value
        if len(config) > most:
            keep = np.sort(rng.choice(len(config), most, replace=False))
            config, cell, value = config[keep], cell[keep], value[keep]
        found = minimize(
            self._loss,
            self.hyper.theta,
            args=(config, cell, value),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": steps, "maxfun": steps + 5},
        )
        if np.isfinite(found.fun):
            self.hyper = Hyperparameters(np.asarray(found.x, dtype=np.float64), self.x.shape[1])

    def condition(self) -> Floats:
        """Conditions on the observations and returns the posterior mean, float64 [cells, configs]."""
        parts = _Parts(self, self.hyper, self.config)
        self._parts = parts
        self._factor = cholesky(self._covariance(parts, self.config, self.cell), lower=True, check_finite=False)
        alpha = cho_solve((self._factor, True), self.value, check_finite=False)
        mass = np.zeros((len(parts.unique), len(self.z)))
        np.add.at(mass, (parts.where, self.cell), alpha)
        self._near = _matern(self.x / self.hyper.lengths, self.x[parts.unique] / self.hyper.lengths)
        mean = self._near @ (mass @ parts.smooth)
        mean[parts.unique] += mass @ parts.own
        mean += _LEVEL * mass.sum(axis=0)
        if self.basis.shape[1]:
            self._alike = self.basis @ self.basis[parts.unique].T
            mean += self._alike @ (mass @ parts.steady)
        pull = np.bincount(self.cell, self.prior[self.cell, self.config] * alpha, len(self.z))
        mean += self.prior.T * (parts.weights @ pull)
        return np.asarray(np.ascontiguousarray(mean.T))

    def covariances(self, shortlists: Sequence[Ints]) -> list[Floats]:
        """Posterior covariance of a shortlist of configs for every cell, float64 [n, n] each."""
        parts = self._parts
        cells = np.repeat(np.arange(len(shortlists)), [len(s) for s in shortlists])
        configs = np.concatenate(shortlists)
        cross = _spread(self._near, configs, parts.where)
        cross *= _spread(parts.smooth, cells, self.cell)
        if self.basis.shape[1]:
            alike = _spread(self._alike, configs, parts.where)
            alike *= _spread(parts.steady, cells, self.cell)
            cross += alike
        one, two = np.nonzero(configs[:, None] == self.config)
        cross[one, two] += parts.own[cells[one], self.cell[two]]
        cross[cells[:, None] == self.cell] += _LEVEL
        weights = _spread(parts.weights, cells, self.cell)
        weights *= np.outer(self.prior[cells, configs], self.prior[self.cell, self.config])
        cross += weights
        half = solve_triangular(self._factor, cross.T, lower=True, check_finite=False)
        out, start = [], 0
        for cell, shortlist in enumerate(shortlists):
            part = half[:, start : start + len(shortlist)]
            start += len(shortlist)
            out.append(self.prior_covariance(shortlist, cell) - part.T @ part)
        return out

    def prior_covariance(self, configs: Ints, cell: int) -> Floats:
        """Covariance of configs in one cell before anything is observed, float64 [n, n]."""
        shared, local, own, _ = self.hyper.variances
        scaled = self.x[configs] / self.hyper.lengths
        out = _matern(scaled, scaled) * (shared + local) + np.eye(len(configs)) * own + _LEVEL
        prior = self.prior[cell, configs]
        out += self.hyper.weight_kernel[0] * np.outer(prior, prior)
        if self.basis.shape[1]:
            out += self.hyper.basis_kernel[0] * (self.basis[configs] @ self.basis[configs].T)
        return np.asarray(out)

    # -- covariance and marginal likelihood -----------------------------------------------------------

    def _covariance(self, parts: _Parts, config: Ints, cell: Ints) -> Floats:
        out = _spread(parts.near, parts.where, parts.where)
        out *= _spread(parts.smooth, cell, cell)
        if self.basis.shape[1]:
            alike = _spread(parts.alike, parts.where, parts.where)
            alike *= _spread(parts.steady, cell, cell)
            out += alike
        one, two = np.nonzero(config[:, None] == config)
        out[one, two] += parts.own[cell[one], cell[two]]
        out[cell[:, None] == cell] += _LEVEL
        prior = self.prior[cell, config]
        weights = _spread(parts.weights, cell, cell)
        weights *= np.outer(prior, prior)
        out += weights
        out[np.diag_indices(len(config))] += self.hyper_noise(parts.hyper)
        return np.asarray(out)

    @staticmethod
    def hyper_noise(hyper: Hyperparameters) -> float:
        """Variance of the noise, with a floor that keeps the covariance well conditioned."""
        return float(hyper.variances[3]) + 1e-6

    def _loss(self, theta: Floats, config: Ints, cell: Ints, value: Floats) -> tuple[float, Floats]:
        """Negative log of marginal likelihood times prior, and its gradient."""
        hyper = Hyperparameters(theta, self.x.shape[1])
        parts = _Parts(self, hyper, config, gradient=True)
        count, cells = len(config), len(self.z)
        pull = (theta - self._start) / _SPREAD
        try:
            factor = cholesky(self._covariance(parts, config, cell), lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return math.inf, np.zeros_like(theta)
        inverse = cho_solve((factor, True), np.eye(count), check_finite=False)
        alpha = inverse @ value
        loss = 0.5 * value @ alpha + np.log(np.diag(factor)).sum() + 0.5 * (pull @ pull)

        slope = 0.5 * (inverse - np.outer(alpha, alpha))  # d loss / d covariance
        pair = (cell[:, None] * cells + cell).ravel()

        def per_cell(matrix: Floats) -> Floats:
            return np.bincount(pair, matrix.ravel(), cells * cells).reshape(cells, cells).astype(np.float64)

        by_near = per_cell(slope * parts.near[np.ix_(parts.where, parts.where)])
        by_same = per_cell(slope * (config[:, None] == config))
        shared, local, own, noise = hyper.variances
        gradient = np.zeros_like(theta)
        n = self.x.shape[1]
        for part, (variance, by) in enumerate(((shared, by_near), (local, by_near), (own, by_same))):
            kernel = parts.cells[part]
            gradient[part] = 2 * variance * (by * kernel.value).sum()
            gradient[4 + n + part] = variance * (by * kernel.by_length).sum()
            gradient[7 + n + part] = variance * (by * kernel.by_role).sum()
        gradient[3] = 2 * noise * np.trace(slope)

        size = len(parts.unique)
        at = (parts.where[:, None] * size + parts.where).ravel()
        by_config = np.bincount(at, (slope * parts.smooth[np.ix_(cell, cell)]).ravel(), size * size)
        by_config = by_config.reshape(size, size) * parts.near_slope
        squares = parts.scaled**2
        gradient[4 : 4 + n] = (
            by_config.sum(axis=1) @ squares
            + by_config.sum(axis=0) @ squares
            - 2 * np.einsum("in,ij,jn->n", parts.scaled, by_config, parts.scaled, optimize=True)
        )
        prior = self.prior[cell, config]
        by_weight = per_cell(slope * np.outer(prior, prior))
        kernel = parts.cells[3]
        variance = hyper.weight_kernel[0]
        gradient[-5] = 2 * variance * (by_weight * kernel.value).sum()
        gradient[-4] = variance * (by_weight * kernel.by_length).sum()
        if self.basis.shape[1]:
            by_basis = per_cell(slope * _spread(parts.alike, parts.where, parts.where))
            kernel = parts.cells[4]
            variance = hyper.basis_kernel[0]
            gradient[-3] = 2 * variance * (by_basis * kernel.value).sum()
            gradient[-2] = variance * (by_basis * kernel.by_length).sum()
            gradient[-1] = variance * (by_basis * kernel.by_role).sum()
        return float(loss), gradient + pull / _SPREAD


@dataclass(frozen=True)
class _CellKernel:
    """Matern-3/2 over log2 M times the correlation between roles, with derivatives."""

    value: Floats
    by_length: Floats
    by_role: Floats

    @classmethod
    def of(cls, z: Floats, length: float, role: float) -> _CellKernel:
        distance = _ROOT3 * np.abs(z[:, :1] - z[:, 0]) / length
        same = z[:, 1:] == z[:, 1]
        decay = np.exp(-distance)
        along = (1 + distance) * decay
        factor = np.where(same, 1.0, role)
        return cls(along * factor, distance**2 * decay * factor, np.where(same, 0.0, role * (1 - role)) * along)


class _Parts:
    """The small matrices that a covariance is put together from."""

    def __init__(self, model: Surrogate, hyper: Hyperparameters, config: Ints, *, gradient: bool = False) -> None:
        self.hyper = hyper
        self.unique, self.where = np.unique(config, return_inverse=True)
        self.scaled = model.x[self.unique] / hyper.lengths
        self.near = _matern(self.scaled, self.scaled)
        if gradient:
            self.near_slope = 3 * np.exp(-_ROOT3 * np.sqrt(_squares(self.scaled, self.scaled)))
        variance, length = hyper.weight_kernel
        self.cells = [_CellKernel.of(model.z, *hyper.cell_kernel(part)) for part in range(3)]
        self.cells.append(_CellKernel.of(model.z, length, 1.0))
        steady, length, role = hyper.basis_kernel
        self.cells.append(_CellKernel.of(model.z, length, role))
        shared, local, own, _ = hyper.variances
        self.smooth = shared * self.cells[0].value + local * self.cells[1].value
        self.own = own * self.cells[2].value
        self.weights = variance * self.cells[3].value
        self.steady = steady * self.cells[4].value
        if model.basis.shape[1]:
            basis = model.basis[self.unique]
            self.alike = basis @ basis.T


def _spread(matrix: Floats, rows: Ints, columns: Ints) -> Floats:
    """``matrix[rows][:, columns]``, gathered one axis at a time: several times faster than both at once."""
    return np.asarray(np.take(np.take(matrix, columns, axis=1), rows, axis=0))


def _squares(a: Floats, b: Floats) -> Floats:
    out = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * (a @ b.T)
    return np.asarray(np.maximum(out, 0.0))


def _matern(a: Floats, b: Floats) -> Floats:
    """Matern-3/2 of scaled features."""
    r = _ROOT3 * np.sqrt(_squares(a, b))
    return np.asarray((1 + r) * np.exp(-r))
