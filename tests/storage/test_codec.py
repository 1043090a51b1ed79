"""Packing: any measurement survives the way through JSON attributes."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeopt.core.config import PARAMETERS, REQUIRED_KEYS, LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell, Failure, Job, Measurement, Resources
from moeopt.measure.roofline import drawn_work
from moeopt.storage.codec import PACKED, TrialContext, decode, encode, pack, repack, unpack, unpack_all

NOW = datetime(2026, 1, 2, 3, 4, 5)
CONTEXT = TrialContext(MoEShape(256, 8, 3072, 256), roofline_us=100.0, launch_bytes=250e6)
times = st.floats(min_value=0.01, max_value=1e7)
configs = st.builds(LaunchConfig, *[st.integers(1, 1024)] * 6, maxnreg=st.integers(0, 255), use_tma=st.booleans())
resources = st.builds(Resources, st.integers(0, 255), st.integers(0, 9999), st.integers(0, 300000), times)
measurements = st.builds(
    Measurement,
    job=st.builds(Job, st.builds(Cell, st.sampled_from(["up", "down", "joint"]), st.integers(1, 99999)), configs),
    status=st.sampled_from(["ok", "raced_out", "rejected", "failed"]),
    us=st.lists(times, max_size=20).map(tuple),
    relative_error=st.none() | st.floats(0, 10) | st.just(float("inf")),
    resources=st.dictionaries(st.sampled_from(["up", "down"]), resources),
    failure=st.none()
    | st.builds(Failure, st.sampled_from(["compile", "runtime"]), st.text(max_size=3000), st.none() | st.text()),
    extra=st.dictionaries(st.text(max_size=20), st.integers() | st.text(max_size=200) | st.booleans(), max_size=5),
)


@given(measurements, st.text(max_size=12), st.integers(0, 10**6))
def test_round_trip(measurement: Measurement, run: str, seq: int) -> None:
    row = encode(measurement, run, seq, CONTEXT, NOW, NOW)
    attrs = json.loads(json.dumps(row.user_attrs))
    assert all(len(json.dumps(value)) <= 2045 for value in row.user_attrs.values())
    back = decode(measurement.job.cell, unpack(PACKED, attrs), NOW)
    assert back.measurement == measurement
    assert (back.run, back.seq, back.ended) == (run, seq, NOW)
    for name, value in row.params.items():
        distribution = PARAMETERS[name].distribution(value)
        assert distribution._contains(distribution.to_internal_repr(value))


@settings(max_examples=50)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=9)))
def test_pack_round_trip(value: Any) -> None:
    assert unpack("name", pack("name", value)) == value


@given(st.lists(st.text(max_size=4000), min_size=1, max_size=5))
def test_a_value_is_replaced_whatever_its_length(values: list[str]) -> None:
    attrs: dict[str, Any] = {"other": 1}
    for value in values:
        attrs.update(repack("name", value, attrs))
    assert unpack_all(attrs)["name"] == values[-1]
    assert attrs["other"] == 1


def test_what_a_person_sees() -> None:
    job = Job(Cell("up", 64), LaunchConfig(16, 64, 128, 1, 4, 3))
    measurement = Measurement(job, "ok", (200.0, 100.0, 125.0), 0.00171, {"up": Resources(128, 8, 4096, 0.8)})
    row = encode(measurement, "run", 0, CONTEXT, NOW, NOW)
    flop = 2 * 64 * 8 * 512 * 3072
    assert row.value == 125.0
    assert row.user_attrs["TFLOP/s"] == round(flop / 125e-6 / 1e12, 2)
    assert row.user_attrs["fraction of roofline"] == 0.8
    assert row.user_attrs["GB/s"] == 2000.0
    assert row.user_attrs["µs per round"] == [200.0, 100.0, 125.0]
    assert {name: row.user_attrs[name] for name in ("registers", "spills", "shared bytes", "compile s")} == {
        "registers": 128, "spills": 8, "shared bytes": 4096, "compile s": 0.8,
    }  # fmt: skip
    assert row.user_attrs["relative error"] == 0.00171
    assert "reason" not in row.user_attrs
    failed = Measurement(job, "failed", failure=Failure("compile", "PassManager::run failed"))
    assert encode(failed, "run", 0, CONTEXT, NOW, NOW).user_attrs["reason"] == "compile: PassManager::run failed"


def test_operations_of_shared_experts_are_counted_on_every_rank() -> None:
    """As the roofline counts them (within what its six drawn routings differ by)."""
    shape = MoEShape(33, 9, 6144, 256, shared_experts=1, ep_size=8)
    job = Job(Cell("up", 64), LaunchConfig(16, 64, 128, 1, 4, 3))
    row = encode(Measurement(job, "ok", (1.0,)), "run", 0, TrialContext(shape), NOW, NOW)
    counted = drawn_work(shape, "up", 64, "uniform", 0).flops
    assert row.user_attrs["TFLOP/s"] == round(2 * 64 * (1 + 8 / 8) * 512 * 6144 / 1e6, 2)
    assert row.user_attrs["TFLOP/s"] == pytest.approx(counted / 1e6, rel=0.05)


def test_only_what_is_searched_or_set_is_a_parameter() -> None:
    """A parameter that never varies would show up in importance plots."""
    cell = Cell("up", 64)
    plain = Measurement(Job(cell, LaunchConfig(16, 64, 128, 1, 4, 3)), "ok", (1.0,))
    limited = Measurement(Job(cell, LaunchConfig(16, 64, 128, 1, 4, 3, 168, True)), "ok", (1.0,))
    wide = TrialContext(CONTEXT.shape, params=(*REQUIRED_KEYS, "maxnreg"))
    assert set(encode(plain, "run", 0, CONTEXT, NOW, NOW).params) == set(REQUIRED_KEYS)
    assert encode(plain, "run", 0, wide, NOW, NOW).params["maxnreg"] == 0
    both = encode(limited, "run", 0, CONTEXT, NOW, NOW).params
    assert (both["maxnreg"], both["USE_TMA"]) == (168, True)
