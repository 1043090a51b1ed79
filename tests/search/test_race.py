"""Pruners as judges of a race."""

from __future__ import annotations

import warnings

from optuna.pruners import PercentilePruner, ThresholdPruner

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.search.ledger import Ledger
from moeopt.search.pruner import RacingPruner
from moeopt.search.race import PrunerRace

CELL, OTHER = Cell("up", 8), Cell("down", 8)


def job(stages: int, cell: Cell = CELL) -> Job:
    return Job(cell, LaunchConfig(16, 64, 64, 1, 4, stages))


def ok(j: Job, us: float) -> Measurement:
    return Measurement(j, "ok", us=(us,) * 3)


def test_our_own_races_against_the_incumbent_of_the_same_cell() -> None:
    ledger = Ledger([CELL, OTHER])
    race = PrunerRace(RacingPruner(), ledger)
    assert not race.lost(job(2), [1e6]), "nothing to race against"
    ledger.add([ok(job(3), 10.0)])
    assert race.lost(job(2), [14.0])
    assert not race.lost(job(2), [12.0])
    assert not race.lost(job(2, OTHER), [14.0])


def test_a_config_that_the_other_role_needs_is_timed_in_full() -> None:
    def of(block: int, cell: Cell) -> Job:
        return Job(cell, LaunchConfig(block, 64, 64, 1, 4, 2))

    ledger = Ledger([CELL, OTHER])
    race = PrunerRace(RacingPruner(), ledger)
    ledger.add([ok(of(32, CELL), 24.0), ok(of(16, OTHER), 14.0)])
    assert not race.lost(of(16, CELL), [26.0] * 3), "no BLOCK_SIZE_M in common yet"
    assert race.lost(of(16, CELL), [32.0] * 3), "more than 1.3 times slower all the same"
    ledger.add([ok(of(32, OTHER), 16.0)])
    assert not race.lost(of(16, CELL), [26.0] * 3), "26 + 14 is what 24 + 16 is"
    assert race.lost(of(16, CELL), [28.0] * 3)
    assert race.lost(of(64, CELL), [28.0] * 3), "with 14, the best of the other role, more than 40"
    ledger.add([ok(of(16, CELL), 24.0)])
    assert race.lost(Job(CELL, LaunchConfig(16, 128, 64, 1, 4, 2)), [26.0] * 3), "there is a faster one of its kind"


def test_a_threshold_sees_microseconds() -> None:
    race = PrunerRace(ThresholdPruner(upper=50.0), Ledger([CELL]))
    assert race.lost(job(2), [51.0])
    assert not race.lost(job(3), [49.0])


def test_a_foreign_pruner_learns_from_what_is_told_raced_or_not() -> None:
    race = PrunerRace(PercentilePruner(50.0, n_startup_trials=3), Ledger([CELL]))
    race.tell([ok(job(stages), 10.0 + stages) for stages in (2, 3)])  # from a database: never raced
    assert not race.lost(job(4), [11.0])
    race.tell([ok(job(4), 11.0)])
    assert race.lost(job(5), [100.0])
    race.tell([Measurement(job(5), "raced_out", us=(100.0,))])
    assert not race.lost(job(6), [9.0])
    race.tell([Measurement(job(6), "failed")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not race.lost(job(7), [10.0])


def test_the_fastest_of_a_cell_is_never_raced_out() -> None:
    def of(block: int, cell: Cell) -> Job:
        return Job(cell, LaunchConfig(block, 64, 64, 1, 4, 2))

    ledger = Ledger([CELL, OTHER])
    ledger.add([ok(of(32, CELL), 24.0), ok(of(32, OTHER), 16.0), ok(of(64, OTHER), 50.0)])
    race = PrunerRace(RacingPruner(), ledger)
    assert ledger.to_beat(of(64, CELL)) == -10.0
    assert not race.lost(of(64, CELL), [20.0] * 3), "the next down of 64 may be fast"
    assert race.lost(of(64, CELL), [28.0] * 3)


def test_a_cell_that_is_not_tuned_has_no_race() -> None:
    assert not PrunerRace(RacingPruner(), Ledger([CELL])).lost(job(2, OTHER), [1.0])
