"""Batch sizes are added where the nearest key's config is slow, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt.core.config import LaunchConfig
from moeopt.export import InterpolatedTimes, find_rungs, with_rungs
from moeopt.export.names import nearest_key

SMALL = LaunchConfig(16, 64, 128, 1, 4, 3)
LARGE = LaunchConfig(128, 128, 64, 8, 8, 3)


def crossing(at: float, slope: float = 0.05):
    """SMALL takes 100 µs at every M; LARGE is faster from ``at`` on, and slower before it."""

    def time_us(role, m: int, config: LaunchConfig) -> float:
        return 100.0 if config == SMALL else 100.0 * (at / m) ** slope

    return time_us


def test_nothing_is_added_where_the_change_is_half_way() -> None:
    ladder = find_rungs({64: SMALL, 128: LARGE}, None, crossing(96))
    assert ladder.rungs == () and ladder.unknown == ()


def test_the_upper_configs_are_better_below_the_midpoint() -> None:
    ladder = find_rungs({64: SMALL, 1024: LARGE}, None, crossing(100, slope=0.1))
    assert len(ladder.rungs) == 1
    assert all(r.copied_from == 1024 and r.up == r.down == LARGE and r.gain > 0.02 for r in ladder.rungs)
    # From the lowest new key on the engine runs LARGE, and below it SMALL is not over 2 % slower.
    keys = sorted({64, 1024, *(r.batch_size for r in ladder.rungs)})
    up, _ = with_rungs({64: SMALL, 1024: LARGE}, None, ladder.rungs)
    for m in range(64, 1025):
        config = up[nearest_key(keys, m)]
        if config == SMALL:
            assert crossing(100, slope=0.1)("up", m, LARGE) >= 100 / 1.02 - 2


def test_the_lower_configs_are_better_above_the_midpoint() -> None:
    time_us = crossing(900, slope=0.5)
    (rung,) = find_rungs({64: SMALL, 1024: LARGE}, None, time_us).rungs
    assert rung.copied_from == 64 and rung.up == SMALL
    assert rung.worst_at == 545 and rung.nearest_us == pytest.approx(2 * time_us("up", 545, LARGE))
    # Above the new key and half way to the next one LARGE runs, and is not over 2 % slower.
    assert time_us("up", (rung.batch_size + 1024) // 2 + 1, LARGE) < 102


def test_both_projections_are_added_together() -> None:
    down = LaunchConfig(128, 64, 64, 1, 4, 2)
    ladder = find_rungs({64: SMALL, 1024: LARGE}, {64: SMALL, 1024: down}, crossing(70, slope=0.1))
    up, both = with_rungs({64: SMALL, 1024: LARGE}, {64: SMALL, 1024: down}, ladder.rungs)
    assert both is not None and list(up) == list(both) == sorted(up)
    assert both[ladder.rungs[0].batch_size] == down


def test_times_that_are_not_known_add_nothing_and_are_told() -> None:
    ladder = find_rungs({64: SMALL, 128: LARGE}, None, lambda role, m, config: None)
    assert ladder.rungs == () and ladder.unknown == (96, 97)


def test_neighbours_without_a_number_between_them() -> None:
    assert find_rungs({1: SMALL, 2: LARGE, 4: SMALL}, None, crossing(1)).unknown == ()
    assert find_rungs({8: SMALL}, None, crossing(1)).rungs == ()


def test_only_the_largest_gains_are_kept() -> None:
    up = {64 * 4**i: (SMALL, LARGE)[i % 2] for i in range(6)}
    everything = find_rungs(up, None, crossing(1, slope=0.1)).rungs
    two = find_rungs(up, None, crossing(1, slope=0.1), most=2).rungs
    assert len(everything) > 2 and len(two) == 2
    assert min(r.gain for r in two) >= max(r.gain for r in everything if r not in two)


@given(
    st.dictionaries(st.integers(1, 4096), st.sampled_from([SMALL, LARGE]), min_size=1, max_size=8),
    st.floats(1, 4096),
    st.floats(0, 0.9),
)
def test_every_midpoint_ends_within_the_tolerance(up: dict[int, LaunchConfig], at: float, slope: float) -> None:
    time_us = crossing(at, slope=slope)
    ladder = find_rungs(up, None, time_us, most=10_000)
    after, _ = with_rungs(up, None, ladder.rungs)
    assert {m: after[m] for m in up} == up
    assert find_rungs(after, None, time_us, most=10_000).rungs == ()


def test_interpolation_is_a_power_law_between_two_timed_batch_sizes() -> None:
    estimate = InterpolatedTimes({("up", SMALL): {16: 10.0, 64: 40.0}})
    assert estimate("up", 16, SMALL) == 10.0
    assert estimate("up", 32, SMALL) == pytest.approx(20.0)
    assert estimate("up", 8, SMALL) is None
    assert estimate("up", 128, SMALL) is None
    assert estimate("down", 32, SMALL) is None
