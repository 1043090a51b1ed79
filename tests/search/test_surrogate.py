"""The Gaussian process: gradients, interpolation, and what is shared between cells."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import approx_fprime

from moeopt.core.config import LaunchConfig, config_table
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell
from moeopt.search.features import cell_features, config_features
from moeopt.search.surrogate import Hyperparameters, Surrogate

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
    return Surrogate(config_features(config_table(configs)), cell_features(CELLS), expected, basis), y


def observe(model: Surrogate, y: NDArray[np.float64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rng = np.random.default_rng(1)
    cell = np.repeat(np.arange(len(CELLS)), count)
    config = np.concatenate([rng.choice(y.shape[1], count, replace=False) for _ in CELLS])
    model.observe(config, cell, y[cell, config] - y[cell, config].mean())
    return config, cell


@pytest.mark.parametrize(("prior", "rank"), [(False, 0), (True, 0), (True, 5)])
def test_the_gradient_is_that_of_the_loss(prior: bool, rank: int) -> None:
    model, y = model_of(prior, rank)
    config, cell = observe(model, y, 8)
    rng = np.random.default_rng(2)
    theta = model.hyper.theta + 0.2 * rng.standard_normal(len(model.hyper.theta))
    _, gradient = model._loss(theta, config, cell, model.value)
    numeric = approx_fprime(theta, lambda t: model._loss(t, config, cell, model.value)[0], 1e-6)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-3, atol=1e-3 * np.abs(numeric).max())


def test_fitting_lowers_the_loss_and_is_the_same_twice() -> None:
    thetas = []
    for _ in range(2):
        model, y = model_of()
        config, cell = observe(model, y, 20)
        before = model._loss(model.hyper.theta, config, cell, model.value)[0]
        model.fit(np.random.default_rng(3), most=1000)
        assert model._loss(model.hyper.theta, config, cell, model.value)[0] < before
        thetas.append(model.hyper.theta)
    np.testing.assert_array_equal(thetas[0], thetas[1])


def test_the_mean_goes_through_the_observations() -> None:
    model, y = model_of()
    config, cell = observe(model, y, 20)
    mean = model.condition()
    assert mean.shape == y.shape
    assert np.abs(mean[cell, config] - model.value).max() < 0.03


def test_one_batch_size_learns_from_its_neighbours_and_the_other_role() -> None:
    model, y = model_of(prior=False)
    rng = np.random.default_rng(4)
    cell = np.repeat([0, 1, 3, 4, 5], 30)  # nothing of cell 2
    config = np.concatenate([rng.choice(y.shape[1], 30, replace=False) for _ in range(5)])
    model.observe(config, cell, y[cell, config] - np.array([y[c].mean() for c in range(6)])[cell])
    mean = model.condition()[2]
    assert np.corrcoef(mean, y[2])[0, 1] > 0.7


def test_covariances_shrink_where_something_was_observed_and_stay_positive() -> None:
    model, y = model_of()
    config, cell = observe(model, y, 20)
    model.condition()
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
    config, cell = observe(model, y, 6)
    mean = model.condition()
    asked = np.array([3, 50, 101])
    everything = (np.concatenate([config, asked]), np.concatenate([cell, np.full(3, 4)]))
    from moeopt.search.surrogate import _Parts

    dense = model._covariance(_Parts(model, model.hyper, everything[0]), *everything)
    n = len(config)
    solve = np.linalg.solve(dense[:n, :n], dense[:n, n:])
    np.testing.assert_allclose(mean[4, asked], solve.T @ model.value, atol=1e-8)
    lists = [np.empty(0, dtype=np.int64)] * 4 + [asked] + [np.empty(0, dtype=np.int64)]
    noise = np.eye(3) * model.hyper_noise(model.hyper)
    np.testing.assert_allclose(model.covariances(lists)[4], dense[n:, n:] - noise - dense[n:, :n] @ solve, atol=1e-8)


def test_default_hyperparameters_have_the_stated_parts() -> None:
    hyper = Hyperparameters.default(11)
    assert hyper.lengths.shape == (11,)
    assert len(hyper.theta) == 4 + 11 + 6 + 2 + 3
    length, role = hyper.cell_kernel(0)
    assert length > hyper.cell_kernel(1)[0]
    assert 0 < role < 1
