"""The Gaussian process: gradients, interpolation, and what is shared between cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import multivariate_normal

from moeopt.core.config import LaunchConfig, config_table
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell
from moeopt.search.features import cell_features, config_features
from moeopt.search.surrogate import ALONE, WITH_RECORDINGS, CellKernel, Surrogate

SPACE = SearchSpace(
    "small",
    {
        "BLOCK_SIZE_M": (16, 32, 64, 128),
        "BLOCK_SIZE_N": (32, 64, 128),
        "BLOCK_SIZE_K": (64, 128),
        "GROUP_SIZE_M": (1, 16),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
)
CELLS = tuple(Cell(role, m) for m in (1, 16, 256) for role in ("up", "down"))


def truth(configs: tuple[LaunchConfig, ...]) -> NDArray[np.float64]:
    """A smooth landscape over [cells, configs]; roles differ by a little, batch sizes by BLOCK_SIZE_M."""
    rows = []
    for cell in CELLS:
        best = 4.0 + np.log2(cell.batch_size) / 3
        rows.append(
            [
                0.1 * (np.log2(c.block_size_m) - best) ** 2 / 4
                + 0.05 * abs(np.log2(c.block_size_n) - (6.0 if cell.role == "up" else 6.5))
                + 0.03 * (c.num_stages - 3) ** 2
                for c in configs
            ]
        )
    return np.array(rows)


def model_of(prior: bool = True, rank: int = 0) -> tuple[Surrogate, NDArray[np.float64]]:
    configs = SPACE.configs()
    y = truth(configs)
    rng = np.random.default_rng(0)
    expected = y + 0.1 * rng.standard_normal(y.shape) if prior else np.zeros_like(y)
    basis = 0.1 * rng.standard_normal((len(configs), rank))
    model = Surrogate(config_features(config_table(configs)), cell_features(CELLS), expected, basis)
    return model, y


def inputs_of(model: Surrogate) -> tuple[NDArray[np.float64], ...]:
    """What a model was made with: features of configs and cells, prior mean, basis."""
    return config_features(config_table(SPACE.configs())), cell_features(CELLS), model._prior, model._basis


def drawn(y: NDArray[np.float64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Config, cell and value of ``count`` observations of each cell."""
    rng = np.random.default_rng(1)
    cell = np.repeat(np.arange(len(CELLS)), count)
    config = np.concatenate([rng.choice(y.shape[1], count, replace=False) for _ in CELLS])
    return config, cell, y[cell, config] - y[cell, config].mean()


@pytest.mark.parametrize(("prior", "rank"), [(False, 0), (True, 0), (True, 5)])
def test_the_likelihood_is_that_of_a_dense_covariance(prior: bool, rank: int) -> None:
    """Against scipy's multivariate normal distribution of the covariance that the docstring states."""
    model, y = model_of(prior, rank)
    config, cell, value = drawn(y, 8)
    model.condition(config, cell, value)
    density = multivariate_normal(cov=dense(model, config, cell)).logpdf(value)
    constant = 0.5 * len(value) * np.log(2 * np.pi)
    assert model.log_likelihood == pytest.approx(density + constant, rel=1e-6)


def test_hyperparameters_far_from_the_landscape_are_less_likely() -> None:
    model, y = model_of()
    given = drawn(y, 20)
    likely = []
    for noise in (model.hyper.noise, 1.0):
        other = Surrogate(*inputs_of(model), replace(model.hyper, noise=noise))
        other.condition(*given)
        likely.append(other.log_likelihood)
    assert likely[0] > likely[1]


def test_the_mean_goes_through_the_observations() -> None:
    model, y = model_of()
    config, cell, value = drawn(y, 20)
    mean = model.condition(config, cell, value)
    assert mean.shape == y.shape
    assert np.abs(mean[cell, config] - value).max() < 0.03


def test_one_batch_size_learns_from_its_neighbours_and_the_other_role() -> None:
    model, y = model_of(prior=False)
    rng = np.random.default_rng(4)
    cell = np.repeat([0, 1, 3, 4, 5], 30)  # nothing of cell 2
    config = np.concatenate([rng.choice(y.shape[1], 30, replace=False) for _ in range(5)])
    mean = model.condition(config, cell, y[cell, config] - np.array([y[c].mean() for c in range(6)])[cell])[2]
    assert np.corrcoef(mean, y[2])[0, 1] > 0.7


def test_covariances_shrink_where_something_was_observed_and_stay_positive() -> None:
    model, y = model_of()
    config, cell, value = drawn(y, 20)
    model.condition(config, cell, value)
    seen = np.unique(config[cell == 0])
    lists = [seen, *[np.arange(10)] * 5]
    after = model.covariances(lists)
    before = model.prior_covariance(seen, 0)
    assert (np.diag(after[0]) < 0.01 * np.diag(before)).all()
    for covariance in after:
        assert np.linalg.eigvalsh(covariance).min() > -1e-8
        np.testing.assert_allclose(covariance, covariance.T, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 5])
def test_covariances_are_those_of_the_whole_process(rank: int) -> None:
    """Against the textbook formula on one dense covariance of everything."""
    model, y = model_of(rank=rank)
    config, cell, value = drawn(y, 6)
    mean = model.condition(config, cell, value)
    asked = np.array([3, 50, 101])
    whole = dense(model, np.concatenate([config, asked]), np.concatenate([cell, np.full(3, 4)]))
    n = len(config)
    solve = np.linalg.solve(whole[:n, :n], whole[:n, n:])
    np.testing.assert_allclose(mean[4, asked], solve.T @ value, atol=1e-8)
    lists = [np.empty(0, dtype=np.int64)] * 4 + [asked] + [np.empty(0, dtype=np.int64)]
    noise = np.eye(3) * (model.hyper.noise**2 + 1e-6)
    np.testing.assert_allclose(model.covariances(lists)[4], whole[n:, n:] - noise - whole[n:, :n] @ solve, atol=1e-8)


def dense(model: Surrogate, config: NDArray[np.int64], cell: NDArray[np.int64]) -> NDArray[np.float64]:
    """The covariance of observations, pair by pair, as the module's docstring states it."""
    x = config_features(config_table(SPACE.configs())) / np.array(model.hyper.lengths)
    z, h, (_, _, prior, basis) = cell_features(CELLS), model.hyper, inputs_of(model)

    def matern(distance: float) -> float:
        return float((1 + np.sqrt(3) * distance) * np.exp(-np.sqrt(3) * distance))

    def over(kernel: CellKernel, a: int, b: int) -> float:
        roles = 1.0 if z[a, 1] == z[b, 1] else kernel.between_roles
        return kernel.amplitude**2 * matern(abs(z[a, 0] - z[b, 0]) / kernel.length) * roles

    out = np.zeros((len(config), len(config)))
    for i, (c, a) in enumerate(zip(config, cell, strict=True)):
        for j, (d, b) in enumerate(zip(config, cell, strict=True)):
            out[i, j] = matern(float(np.linalg.norm(x[c] - x[d]))) * (over(h.shared, a, b) + over(h.local, a, b))
            out[i, j] += (c == d) * over(h.own, a, b) + (a == b) * 1.0
            out[i, j] += over(h.mean, a, b) * prior[a, c] * prior[b, d] + over(h.basis, a, b) * (basis[c] @ basis[d])
    return out + np.eye(len(config)) * (h.noise**2 + 1e-6)


def test_hyperparameters_are_for_the_features_that_there_are() -> None:
    features = config_features(config_table(SPACE.configs())).shape[1]
    for hyper in (WITH_RECORDINGS, ALONE):
        assert len(hyper.lengths) == features
        assert hyper.length_of(features + 1)[-1] == hyper.lengths[-1], "a new parameter has a length"
        assert hyper.shared.length > hyper.local.length
