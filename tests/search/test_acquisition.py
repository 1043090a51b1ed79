"""Picking a batch: gains, diversity, and sharing compiled configs."""

from __future__ import annotations

import numpy as np

from moeopt.search.acquisition import Shortlist, pick, sample


def shortlist(cell: int, means: list[float], spread: float = 0.01, quota: int = 1, seed: int = 0) -> Shortlist:
    rng = np.random.default_rng(seed)
    samples = sample(np.array(means), np.eye(len(means)) * spread**2, 400, rng)
    return Shortlist(cell, np.arange(len(means)), samples, np.ones(len(means)), np.zeros(400), quota)


def test_samples_have_the_mean_and_covariance() -> None:
    covariance = np.array([[0.04, 0.03, 0.0], [0.03, 0.09, 0.0], [0.0, 0.0, 0.01]])
    mean = np.array([0.1, -0.2, 0.0])
    values = sample(mean, covariance, 20_000, np.random.default_rng(0))
    np.testing.assert_allclose(values.mean(axis=1), mean, atol=1e-12)  # mirrored: exact
    np.testing.assert_allclose(np.cov(values), covariance, atol=3e-3)


def test_a_singular_covariance_is_fine() -> None:
    values = sample(np.zeros(3), np.ones((3, 3)), 100, np.random.default_rng(0))
    np.testing.assert_allclose(values[0], values[1], atol=1e-6)


def test_samples_have_the_mean_and_the_covariance() -> None:
    covariance = np.array([[0.04, 0.03], [0.03, 0.09]])
    mean = np.array([0.1, -0.2])
    values = sample(mean, covariance, 40_000, np.random.default_rng(0))
    np.testing.assert_allclose(values.mean(axis=1), mean, atol=1e-12)
    np.testing.assert_allclose(np.cov(values), covariance, rtol=0.05)


def test_what_the_model_is_sure_is_slow_gains_nothing() -> None:
    mean, covariance = np.array([0.001, 0.21]), np.diag([1e-8, 0.04**2])
    samples = sample(mean, covariance, 256, np.random.default_rng(0))
    assert Shortlist(0, np.arange(2), samples, np.ones(2), np.zeros(256), 1).gains().tolist() == [0.0, 0.0]


def test_the_greatest_expected_improvement_is_picked() -> None:
    assert pick([shortlist(0, [0.1, -0.1, 0.05])], set(), 9, 1.0) == [(0, 1)]


def test_a_batch_does_not_pick_two_of_a_kind() -> None:
    rng = np.random.default_rng(0)
    covariance = np.array([[1.0, 0.999, 0.0], [0.999, 1.0, 0.0], [0.0, 0.0, 1.0]]) * 0.01
    samples = sample(np.array([-0.05, -0.049, 0.0]), covariance, 400, rng)
    both = Shortlist(0, np.arange(3), samples, np.ones(3), np.zeros(400), 2)
    assert [config for _, config in pick([both], set(), 9, 1.0)] == [0, 2]


def test_weights_count() -> None:
    one = shortlist(0, [-0.1, -0.08])
    one.weight = np.array([0.2, 1.0])
    assert pick([one], set(), 9, 1.0) == [(0, 1)]


def test_a_compiled_config_is_preferred_where_it_is_nearly_as_good() -> None:
    assert pick([shortlist(0, [-0.10, -0.09])], {1}, 9, 0.7) == [(0, 1)]
    assert pick([shortlist(0, [-0.10, -0.05])], {1}, 9, 0.7) == [(0, 0)]


def test_cells_share_what_one_of_them_has_compiled() -> None:
    first, second = shortlist(0, [-0.2, 0.1, 0.1]), shortlist(1, [-0.09, -0.10, 0.1])
    assert pick([second, first], set(), 9, 0.7) == [(0, 0), (1, 0)]


def test_the_allowance_is_never_exceeded() -> None:
    lists = [shortlist(cell, list(np.roll([-0.2, -0.1, -0.05, 0.0], cell)), quota=3, seed=cell) for cell in range(4)]
    picked = pick(lists, set(), 2, 0.7)
    assert len({config for _, config in picked}) == 2
    assert len(set(picked)) == len(picked)
    assert pick([shortlist(0, [-0.1, -0.2])], set(), 0, 0.7) == []
    assert pick([shortlist(0, [-0.1, -0.2])], {0}, 0, 0.7) == [(0, 0)]


def test_no_more_than_the_shortlist_holds() -> None:
    assert len(pick([shortlist(0, [0.0, 0.0], quota=5)], set(), 9, 1.0)) == 2


def test_a_config_is_picked_once() -> None:
    one = shortlist(0, [-0.30, -0.29, -0.10], quota=3)
    picked = [config for _, config in pick([one], set(), 9, 1.0)]
    assert sorted(picked) == [0, 1, 2]
    assert one.gains().tolist() == [-1.0, -1.0, -1.0]


def test_each_round_the_cell_that_gains_most_picks_first() -> None:
    """What it picks is compiled, so that the others may take it, too."""
    keen, idle = shortlist(0, [-0.5, -0.1]), shortlist(1, [-0.101, -0.1])
    assert pick([idle, keen], set(), 1, 0.7) == [(0, 0), (1, 0)]


def test_a_batch_is_worth_what_its_best_is() -> None:
    """The second pick is judged by what it adds to the first, not by itself."""
    one = shortlist(0, [-0.2, -0.1])
    before = one.gains()[1]
    one.choose(0)
    assert one.gains()[1] < 0.1 * before
