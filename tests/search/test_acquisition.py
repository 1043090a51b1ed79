"""Picking a batch: gains, diversity, and sharing compiled configs."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from moeopt.search.acquisition import Shortlist, pick, sample
from moeopt.search.failures import chance_to_compile


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


def test_students_t_has_heavier_tails_and_the_same_middle() -> None:
    covariance = np.array([[0.04, 0.03], [0.03, 0.09]])
    mean = np.array([0.1, -0.2])
    values = sample(mean, covariance, 40_000, np.random.default_rng(0), freedom=5.0)
    np.testing.assert_allclose(values.mean(axis=1), mean, atol=1e-12)
    np.testing.assert_allclose(np.cov(values), covariance * 5 / 3, rtol=0.1)  # freedom / (freedom - 2)
    beyond = np.abs(values[0] - 0.1) > 4 * 0.2
    expected = 2 * scipy.stats.t(5).sf(4.0)  # 0.0103; of a normal distribution 0.00006
    assert beyond.mean() == pytest.approx(expected, rel=0.25)


def test_what_the_model_is_sure_of_gets_a_chance_with_heavy_tails() -> None:
    mean, covariance = np.array([0.001, 0.21]), np.diag([1e-8, 0.06**2])  # nothing new, and 3.5 deviations slower

    def gains(freedom: float) -> np.ndarray:
        samples = sample(mean, covariance, 256, np.random.default_rng(0), freedom)
        return Shortlist(0, np.arange(2), samples, np.ones(2), np.zeros(256), 1).gains()

    assert gains(np.inf)[1] == 0.0
    assert gains(5.0)[1] > 0.0


def test_the_greatest_expected_improvement_is_picked() -> None:
    assert pick([shortlist(0, [0.1, -0.1, 0.05])], set(), 9, 1.0, 0.0) == [(0, 1)]


def test_a_batch_does_not_pick_two_of_a_kind() -> None:
    rng = np.random.default_rng(0)
    covariance = np.array([[1.0, 0.999, 0.0], [0.999, 1.0, 0.0], [0.0, 0.0, 1.0]]) * 0.01
    samples = sample(np.array([-0.05, -0.049, 0.0]), covariance, 400, rng)
    both = Shortlist(0, np.arange(3), samples, np.ones(3), np.zeros(400), 2)
    assert [config for _, config in pick([both], set(), 9, 1.0, 0.0)] == [0, 2]


def test_weights_count() -> None:
    one = shortlist(0, [-0.1, -0.08])
    one.weight = np.array([0.2, 1.0])
    assert pick([one], set(), 9, 1.0, 0.0) == [(0, 1)]


def test_a_compiled_config_is_preferred_where_it_is_nearly_as_good() -> None:
    assert pick([shortlist(0, [-0.10, -0.09])], {1}, 9, 0.7, 0.0) == [(0, 1)]
    assert pick([shortlist(0, [-0.10, -0.05])], {1}, 9, 0.7, 0.0) == [(0, 0)]


def test_cells_share_what_one_of_them_has_compiled() -> None:
    first, second = shortlist(0, [-0.2, 0.1, 0.1]), shortlist(1, [-0.09, -0.10, 0.1])
    assert pick([second, first], set(), 9, 0.7, 0.0) == [(0, 0), (1, 0)]


def test_the_allowance_is_never_exceeded() -> None:
    lists = [shortlist(cell, list(np.roll([-0.2, -0.1, -0.05, 0.0], cell)), quota=3, seed=cell) for cell in range(4)]
    picked = pick(lists, set(), 2, 0.7, 0.0)
    assert len({config for _, config in picked}) == 2
    assert len(set(picked)) == len(picked)
    assert pick([shortlist(0, [-0.1, -0.2])], set(), 0, 0.7, 0.0) == []
    assert pick([shortlist(0, [-0.1, -0.2])], {0}, 0, 0.7, 0.0) == [(0, 0)]


def test_no_more_than_the_shortlist_holds() -> None:
    assert len(pick([shortlist(0, [0.0, 0.0], quota=5)], set(), 9, 1.0, 0.0)) == 2


def test_failures_make_their_neighbours_less_likely() -> None:
    features = np.array([[0.0], [0.5], [1.0], [8.0]])
    everything = np.arange(4)
    none = np.empty(0, dtype=np.int64)
    np.testing.assert_array_equal(chance_to_compile(features, everything, none, none), np.ones(4))
    chance = chance_to_compile(features, everything, np.array([0]), none)
    assert chance[0] < chance[1] < chance[2] < 1
    assert chance[3] == pytest.approx(1.0, abs=1e-3)
    with_success = chance_to_compile(features, everything, np.array([0]), np.array([2]))
    assert with_success[1] > chance[1]


def test_no_two_of_one_kind_are_picked() -> None:
    one = shortlist(0, [-0.30, -0.29, -0.10], quota=2)
    one.kind = np.array([7, 7, 8])
    assert [config for _, config in pick([one], set(), 9, 1.0, 0.0)] == [0, 2]


def test_what_goes_first_is_picked_first_for_as_many_turns_as_said() -> None:
    def picked(turns: int) -> list[int]:
        one = shortlist(0, [-0.3, -0.2, -0.1, -0.05], quota=3)
        one.first, one.first_turns = np.array([False, False, True, True]), turns
        one.current = np.zeros(400) + 0.3  # everything gains, also after others
        one.samples = np.where(np.arange(400) % 4 == np.arange(4)[:, None], one.samples, 0.2)
        return [config for _, config in pick([one], set(), 9, 1.0, 0.0)]

    assert set(picked(1)[:1]) <= {2, 3}
    assert picked(1)[1] == 0
    assert set(picked(2)[:2]) == {2, 3}
    assert picked(0)[0] == 0
