"""What the whole-tune and agreement benchmarks make of what they measured."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from benchmarks import agreement, whole_tune
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.kernels.builtin import BuiltinKernel

TILE = LaunchConfig(16, 32, 64, 1, 4, 3)


def row(*pairs: tuple[float, float, float, float], m: int = 64) -> agreement.Row:
    return agreement.Row("bf16", "up", m, TILE, 6, 4, tuple(agreement.Pair(*pair) for pair in pairs), 30.0, 120.0)


def test_pairs_at_two_clocks_do_not_count() -> None:
    same = [(100.0, 101.0, 1.98, 1.975)] * 5
    found = row(*same, (100.0, 110.0, 1.98, 1.70))
    assert len(found.counted) == 5 and found.apart == pytest.approx(100 / 101 - 1)
    assert found.us == (100.0, 101.0)
    assert found.to_dict()["one_clock"] and found.to_dict()["pairs"] == 6


def test_where_too_few_are_at_one_clock_all_count_and_it_says_so() -> None:
    found = row(*[(100.0, 101.0, 1.98, 1.98)] * 4, *[(100.0, 110.0, 1.98, 1.7)] * 5)
    assert len(found.counted) == 9 and found.apart == pytest.approx(100 / 110 - 1)
    assert not found.to_dict()["one_clock"]
    assert "4/4*" not in agreement.report([found]) and "9/9*" in agreement.report([found])
    assert "pairs at two clocks count" in agreement.report([found])


class StandIn:
    """A bench whose rounds take 99 µs."""

    def __init__(self) -> None:
        self._sides = [SimpleNamespace(launches=[lambda: None] * 4)]
        self.rounds = 0

    def prepare(self, cell: object) -> None: ...

    def check(self, job: object) -> None: ...

    def round(self) -> float:
        self.rounds += 1
        return 99.0

    def finish(self) -> None: ...


@pytest.mark.parametrize(("step", "pairs"), [(0.0, 4), (0.2, 9)])
def test_more_pairs_are_timed_while_the_clock_does_not_hold_still(
    monkeypatch: pytest.MonkeyPatch, step: float, pairs: int
) -> None:
    clocks = itertools.cycle([1.9, 1.9 - step, 1.9 - step])
    monkeypatch.setattr(agreement, "clock_ghz", lambda: next(clocks))
    monkeypatch.setattr(agreement, "one_graph", lambda launches, rows: (lambda: None, float(rows)))
    # Six rows of four launches of 99 µs are the first over 2 ms.
    monkeypatch.setattr(agreement, "median_us", lambda _, rep: 2400.0 if rep == agreement.REP_MS else 110.0)
    found = agreement.compare(StandIn(), "bf16", "up", 16, TILE, pairs=4)  # type: ignore[arg-type]
    same = [pair for pair in found.pairs if pair.same_clock]
    assert len(same) == 4 and len(found.pairs) >= pairs
    assert (found.launches, found.rows, found.host_us, found.single_us) == (4, 6, 6.0, 110.0)
    assert found.apart == pytest.approx(-0.01)


def test_the_bar_is_for_kernels_over_50_us() -> None:
    long = row(*[(100.0, 101.0, 1.9, 1.9)] * 5)
    short = row(*[(40.0, 44.0, 1.9, 1.9)] * 5, m=1)
    assert agreement.worst([long, short]) == pytest.approx(1 - 100 / 101)
    assert agreement.worst([short]) is None
    text = agreement.report([long, short])
    assert "worst difference over 50 µs: 0.99 % (bar 2 %: holds)" in text
    assert "MISSED" in agreement.report([row(*[(97.0, 100.0, 1.9, 1.9)] * 5)])


def test_agreement_configs_are_legal() -> None:
    gpu = GpuSpec.by_name("H200")
    for dtype, role, _, config in agreement.CASES:
        assert BuiltinKernel().illegal_reason(config, agreement.SHAPES[dtype], role, gpu) is None


def test_where_the_time_went_adds_up_to_the_wall() -> None:
    run = {
        "wall_s": 20.0,
        "spent_s": {"python and import": 0.5, "import of Optuna, SciPy": 1.0, "open": 1.0, "space": 0.25,
                    "tune": 14.0, "export": 0.1, "close": 0.2},
        "tune_s": {"search": 1.0, "storage": 0.5, "measure": 12.0},
        "device": {"start_s": 1.0, "wait_s": 4.0, "timing_s": 7.0, "control_s": 1.0, "compiled_in_worker": 0},
    }  # fmt: skip
    where = whole_tune.where(run)
    assert sum(where.values()) == pytest.approx(20.0)
    assert where["import"] == 1.5 and where["timing"] == 6.0 and where["search"] == 1.25
    bars = whole_tune.bars({"cold": {**run, "where_s": where}}, 60.0)
    assert bars["search and storage, share"] == (pytest.approx(0.087, abs=1e-3), 0.1, True)
    assert bars["cold tune, s"] == (20.0, 60.0, True)
