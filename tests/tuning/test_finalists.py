"""Finalists: who they are, and that timing them in turn mends a misordering."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.provenance import Provenance
from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.search.ledger import Ledger
from moeopt.storage.store import StudyStore
from moeopt.tuning.finalists import MARGIN, find_finalists, time_finalists, with_finals
from moeopt.tuning.load import load_result
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner

UP, DOWN = Cell("up", 8), Cell("down", 8)


def config(block_m: int, block_n: int) -> LaunchConfig:
    return LaunchConfig(block_m, block_n, 64, 1, 4, 3)


def measured(cell: Cell, block_m: int, block_n: int, us: float) -> Measurement:
    return Measurement(Job(cell, config(block_m, block_n)), "ok", us=(us, us, us))


def ledger(*measurements: Measurement) -> Ledger:
    out = Ledger((UP, DOWN))
    out.add(measurements)
    return out


def test_what_is_within_the_margin_of_the_best_sum_is_a_finalist() -> None:
    jobs = find_finalists(
        ledger(
            measured(UP, 16, 32, 100.0),
            measured(UP, 16, 64, 101.0),
            measured(UP, 16, 128, 110.0),
            measured(UP, 32, 32, 99.0),  # with down of the same rows the sum is far off
            measured(DOWN, 16, 32, 50.0),
            measured(DOWN, 16, 64, 50.0 + 150 * MARGIN + 0.1),
            measured(DOWN, 32, 32, 80.0),
        )
    )
    assert {(j.cell.role, j.config.block_size_m, j.config.block_size_n) for j in jobs} == {
        ("up", 16, 32),
        ("up", 16, 64),
        ("down", 16, 32),
    }


def test_where_one_is_far_ahead_nothing_is_timed_again() -> None:
    assert (
        find_finalists(ledger(measured(UP, 16, 32, 10.0), measured(UP, 16, 64, 20.0), measured(DOWN, 16, 32, 5.0)))
        == []
    )
    assert find_finalists(ledger(measured(UP, 16, 32, 10.0))) == []


def test_the_finals_decide_and_the_others_are_scaled() -> None:
    before = ledger(
        measured(UP, 16, 32, 100.0),
        measured(UP, 16, 64, 101.0),
        measured(UP, 16, 128, 130.0),
        measured(DOWN, 16, 32, 50.0),
    )
    finals = {Job(UP, config(16, 32)): (112.0, 110.0, 111.0), Job(UP, config(16, 64)): (109.0, 110.0, 109.0)}
    after = with_finals(before, finals)
    assert after.choose()[8]["up"].job.config == config(16, 64)
    assert after.choose()[8]["up"].median_us == 109.0
    assert after.rows(UP)[config(16, 128)].median_us == pytest.approx(130.0 * 110.0 / 100.5)
    assert after.rows(DOWN)[config(16, 32)].median_us == 50.0
    assert before.choose()[8]["up"].job.config == config(16, 32)


class Drifting(RecordedDevice):
    """A recording that passes as a GPU: its first timing of one config is 1.5 % too good."""

    def __init__(self, recording: Recording, flattered: LaunchConfig) -> None:
        super().__init__(recording)
        info = Provenance("a fake GPU", "builtin", "0", "0", "3.6.0", "2")
        self.spec = replace(self.spec, provenance=info)
        self.flattered = flattered
        self.seen: set[Job] = set()
        self.asked = 0

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for m in super().measure(jobs, race):
            self.asked += 1
            first = m.job not in self.seen
            self.seen.add(m.job)
            if m.job.config == self.flattered and first and m.us:
                yield Measurement(m.job, m.status, us=tuple(us * 0.985 for us in m.us), resources=m.resources)
            else:
                yield m


def test_a_flattered_config_does_not_win(tiny_recording, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    recording = Recording.load(tiny_recording())
    options = TuneOptions(batch_sizes=(16,), trials=140)
    with StudyStore(tmp_path / "fair.db") as store:
        fair = Tuner(RecordedDevice(recording), store, options).run().best(16).up
    rivals = [
        config
        for config, row in recording.rows.items()
        if row.status == "ok"
        and config.block_size_m == fair.config.block_size_m
        and 1.0 < sorted(row.roles["up"].us[16])[2] / fair.us < 1.012
    ]
    assert rivals, "the landscape has no close rival"
    with StudyStore(tmp_path / "drift.db") as store:
        device = Drifting(recording, rivals[0])
        tuner = Tuner(device, store, options)
        result = tuner.run()
        assert result.best(16).up.config == fair.config
        assert load_result(store, tuner.key).rows == result.rows
        asked = device.asked
        again = Tuner(device, store, options).run()
        assert device.asked == asked, "a second run timed the finalists again"
        assert again.rows == result.rows


def test_a_finalist_that_fails_in_one_pass_is_left_out(tiny_recording) -> None:  # type: ignore[no-untyped-def]
    recording = Recording.load(tiny_recording())
    good = next(c for c, row in recording.rows.items() if row.status == "ok")
    bad = next(c for c, row in recording.rows.items() if row.status == "compile_error")
    finals = time_finalists(RecordedDevice(recording), [Job(Cell("up", 1), good), Job(Cell("up", 1), bad)])
    assert [job.config for job in finals] == [good]
