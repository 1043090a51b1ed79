"""Batch sizes are added where the nearest key's config is slow, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt.core.config import LaunchConfig
from moeopt.core.table import ConfigPair, ConfigTable
from moeopt.export import InterpolatedTimes, find_extra_batch_sizes
from moeopt.export.names import nearest_key

SMALL = LaunchConfig(16, 64, 128, 1, 4, 3)
LARGE = LaunchConfig(128, 128, 64, 8, 8, 3)


def crossing(at: float, slope: float = 0.05):
    """SMALL takes 100 µs at every M; LARGE is faster from ``at`` on, and slower before it."""

    def time_us(role, m: int, config: LaunchConfig) -> float:
        return 100.0 if config == SMALL else 100.0 * (at / m) ** slope

    return time_us


def test_nothing_is_added_where_the_change_is_half_way() -> None:
    extra = find_extra_batch_sizes(ConfigTable.of({64: SMALL, 128: LARGE}), crossing(96))
    assert extra.found == () and extra.unknown == ()


def test_the_upper_configs_are_better_below_the_midpoint() -> None:
    extra = find_extra_batch_sizes(ConfigTable.of({64: SMALL, 1024: LARGE}), crossing(100, slope=0.1))
    assert len(extra.found) == 1
    assert all(r.copied_from == 1024 and r.pair == ConfigPair(LARGE, LARGE) and r.gain > 0.02 for r in extra.found)
    # From the lowest new key on the engine runs LARGE, and below it SMALL is not over 2 % slower.
    keys = sorted({64, 1024, *(r.batch_size for r in extra.found)})
    table = extra.added_to(ConfigTable.of({64: SMALL, 1024: LARGE}))
    assert list(table) == keys
    for m in range(64, 1025):
        config = table[nearest_key(keys, m)].up
        if config == SMALL:
            assert crossing(100, slope=0.1)("up", m, LARGE) >= 100 / 1.02 - 2


def test_the_lower_configs_are_better_above_the_midpoint() -> None:
    time_us = crossing(900, slope=0.5)
    (one,) = find_extra_batch_sizes(ConfigTable.of({64: SMALL, 1024: LARGE}), time_us).found
    assert one.copied_from == 64 and one.pair.up == SMALL
    assert one.worst_at == 545 and one.nearest_us == pytest.approx(2 * time_us("up", 545, LARGE))
    # Above the new key and half way to the next one LARGE runs, and is not over 2 % slower.
    assert time_us("up", (one.batch_size + 1024) // 2 + 1, LARGE) < 102


def test_both_projections_are_added_together() -> None:
    down = LaunchConfig(128, 64, 64, 1, 4, 2)
    table = ConfigTable.of({64: SMALL, 1024: LARGE}, {64: SMALL, 1024: down})
    extra = find_extra_batch_sizes(table, crossing(70, slope=0.1))
    both = extra.added_to(table)
    assert not both.joint and list(both) == sorted(both) and len(both) > len(table)
    assert both[extra.found[0].batch_size].down == down


def test_times_that_are_not_known_add_nothing_and_are_told() -> None:
    extra = find_extra_batch_sizes(ConfigTable.of({64: SMALL, 128: LARGE}), lambda role, m, config: None)
    assert extra.found == () and extra.unknown == (96, 97)


def test_neighbours_without_a_number_between_them() -> None:
    assert find_extra_batch_sizes(ConfigTable.of({1: SMALL, 2: LARGE, 4: SMALL}), crossing(1)).unknown == ()
    assert find_extra_batch_sizes(ConfigTable.of({8: SMALL}), crossing(1)).found == ()


def test_only_the_largest_gains_are_kept() -> None:
    up = {64 * 4**i: (SMALL, LARGE)[i % 2] for i in range(6)}
    everything = find_extra_batch_sizes(ConfigTable.of(up), crossing(1, slope=0.1)).found
    two = find_extra_batch_sizes(ConfigTable.of(up), crossing(1, slope=0.1), most=2).found
    assert len(everything) > 2 and len(two) == 2
    assert min(r.gain for r in two) >= max(r.gain for r in everything if r not in two)


@given(
    st.dictionaries(st.integers(1, 4096), st.sampled_from([SMALL, LARGE]), min_size=1, max_size=8),
    st.floats(1, 4096),
    st.floats(0, 0.9),
)
def test_every_midpoint_ends_within_the_tolerance(up: dict[int, LaunchConfig], at: float, slope: float) -> None:
    time_us = crossing(at, slope=slope)
    extra = find_extra_batch_sizes(ConfigTable.of(up), time_us, most=10_000)
    after = extra.added_to(ConfigTable.of(up))
    assert {m: after[m].up for m in up} == up
    assert find_extra_batch_sizes(after, time_us, most=10_000).found == ()


def test_interpolation_is_a_power_law_between_two_timed_batch_sizes() -> None:
    estimate = InterpolatedTimes({("up", SMALL): {16: 10.0, 64: 40.0}})
    assert estimate("up", 16, SMALL) == 10.0
    assert estimate("up", 32, SMALL) == pytest.approx(20.0)
    assert estimate("up", 8, SMALL) is None
    assert estimate("up", 128, SMALL) is None
    assert estimate("down", 32, SMALL) is None
