"""The ledger keeps one measurement per job and chooses pairs with a shared BLOCK_SIZE_M."""

from __future__ import annotations

import random

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Failure, Job, Measurement
from moeopt.search.ledger import Ledger

UP, DOWN = Cell("up", 8), Cell("down", 8)


def config(block: int, stages: int = 3) -> LaunchConfig:
    return LaunchConfig(block, 64, 64, 1, 4, stages)


def ok(cell: Cell, block: int, us: float, stages: int = 3, status: str = "ok") -> Measurement:
    return Measurement(Job(cell, config(block, stages)), status, us=(us, us * 1.01, us * 0.99))  # type: ignore[arg-type]


def test_the_sum_with_a_shared_block_is_smallest() -> None:
    ledger = Ledger([UP, DOWN])
    ledger.add([ok(UP, 16, 10.0), ok(UP, 64, 11.0), ok(DOWN, 16, 9.0), ok(DOWN, 64, 7.0), ok(DOWN, 128, 1.0)])
    chosen = ledger.choose()[8]
    assert {role: m.job.config.block_size_m for role, m in chosen.items()} == {"up": 64, "down": 64}


def test_what_was_raced_out_is_never_chosen() -> None:
    ledger = Ledger([UP, DOWN])
    ledger.add([ok(UP, 16, 10.0), ok(UP, 16, 1.0, stages=4, status="raced_out"), ok(DOWN, 16, 9.0)])
    assert ledger.choose()[8]["up"].job.config == config(16)
    assert ledger.incumbent(UP) is not None
    assert ledger.incumbent(UP).job.config == config(16)  # type: ignore[union-attr]
    assert ledger.timed(UP) == {config(16): 10.0, config(16, 4): 1.0}


def test_a_full_timing_wins_over_an_earlier_failure_and_a_later_one_does_not_replace_it() -> None:
    ledger = Ledger([UP])
    failed = Measurement(Job(UP, config(16)), "failed", failure=Failure("timeout", "slow"))
    ledger.add([failed])
    assert ledger.failed() == {config(16)}
    ledger.add([ok(UP, 16, 10.0), failed])
    assert ledger.failed() == set()
    assert ledger.rows(UP)[config(16)].status == "ok"


def test_without_a_shared_block_up_stands_alone() -> None:
    ledger = Ledger([UP, DOWN])
    ledger.add([ok(UP, 16, 10.0), ok(DOWN, 64, 9.0)])
    assert set(ledger.choose()[8]) == {"up"}


def test_a_result_takes_what_was_raced_out_before_it_leaves_down_without_a_config() -> None:
    ledger = Ledger([UP, DOWN])
    ledger.add([ok(UP, 16, 10.0), ok(UP, 64, 14.0, status="raced_out"), ok(DOWN, 64, 9.0)])
    assert set(ledger.choose()[8]) == {"up"}
    chosen = ledger.choose(raced_out=True)[8]
    assert {role: m.job.config for role, m in chosen.items()} == {"up": config(64), "down": config(64)}
    ledger.add([ok(DOWN, 16, 30.0)])
    assert ledger.choose(raced_out=True)[8]["up"].job.config == config(16), "what was timed in full comes first"


def test_other_cells_are_dropped_and_untimed_batch_sizes_left_out() -> None:
    ledger = Ledger([UP, DOWN])
    ledger.add([ok(Cell("up", 16), 16, 1.0)])
    assert ledger.choose() == {}
    assert ledger.tried() == set()


def test_ties_go_to_the_smaller_config_whatever_the_order() -> None:
    rows = [ok(UP, 32, 5.0), ok(UP, 16, 5.0)]
    for order in (rows, rows[::-1]):
        ledger = Ledger([UP])
        ledger.add(order)
        assert ledger.incumbent(UP).job.config == config(16)  # type: ignore[union-attr]
        assert ledger.choose()[8]["up"].job.config == config(16)


def test_the_best_of_each_block_is_kept_as_rows_come_and_change() -> None:
    rng = random.Random(3)
    ledger = Ledger([UP])
    for _ in range(300):
        config = LaunchConfig(rng.choice((16, 32, 64)), 64, 64, 1, 4, rng.randint(2, 9))
        status = rng.choice(("ok", "raced_out", "failed"))
        us = (rng.choice((5.0, 6.0, 7.0)) + rng.random(),) if status != "failed" else ()
        ledger.add([Measurement(Job(UP, config), status, us=us)])
        for raced_out in (False, True):
            wanted = ("ok", "raced_out") if raced_out else ("ok",)
            there = [m for m in ledger.rows(UP).values() if m.status in wanted]
            expected = {
                block: min((m for m in there if m.job.config.block_size_m == block), key=lambda m: m.median_us)
                for block in {m.job.config.block_size_m for m in there}
            }
            assert ledger.best_per_block(UP, raced_out=raced_out) == expected
