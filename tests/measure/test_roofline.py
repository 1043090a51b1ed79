"""What no kernel can beat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell
from moeopt.measure.roofline import (
    Rates,
    RateStore,
    Work,
    bound_us,
    drawn_work,
    launch_bytes,
    rate_key,
    roofline_us,
    work,
)

QWEN = MoEShape(256, 8, 3072, 256)
H200 = Rates(4300.0, 4200.0, 780.0)


def test_bytes_are_touched_weights_once_activations_and_outputs() -> None:
    up = work(QWEN, "up", 64, experts=200)
    assert up.bytes == 200 * 512 * 3072 * 2 + 64 * 3072 * 2 + 64 * 8 * 512 * 2
    assert up.flops == 2 * 64 * 8 * 512 * 3072
    down = work(QWEN, "down", 64, experts=200)
    assert down.bytes == 200 * 3072 * 256 * 2 + 64 * 8 * 256 * 2 + 64 * 8 * 3072 * 2
    fp8 = work(MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128)), "up", 1, experts=8)
    assert fp8.bytes == 8 * (512 * 6144 + 4 * 4 * 48) + 6144 + 8 * 512 * 2


def test_experts_elsewhere_cost_nothing_but_their_rows_of_zeros() -> None:
    shape = QWEN.replace(num_experts=64, ep_size=4)
    here = drawn_work(shape, "down", 256, "uniform", 0)
    everything = drawn_work(QWEN, "down", 256, "uniform", 0)
    assert here.flops == pytest.approx(everything.flops / 4, rel=0.1)
    assert here.bytes > 256 * 8 * 3072 * 2


def test_the_slower_of_memory_and_arithmetic_is_the_bound() -> None:
    assert bound_us(Work(4.3e9, 0.0), H200) == pytest.approx(1000.0)
    assert bound_us(Work(0.0, 7.8e11), H200) == pytest.approx(1000.0)
    assert bound_us(Work(4.3e9, 1.56e12), H200) == pytest.approx(2000.0)
    assert bound_us(Work(4.6e9, 0.0), Rates(4300.0, 4600.0, None)) == pytest.approx(1000.0)
    assert bound_us(Work(4.3e9, 1e15), Rates(4300.0, 4200.0, None)) == pytest.approx(1000.0)


def test_the_recorded_landscape_lies_above_its_roofline() -> None:
    # 694 MB of touched experts' weights took about 160 µs on an H200 at M=64.
    assert roofline_us(QWEN, Cell("up", 64), H200, "uniform", 0) == pytest.approx(161, rel=0.03)
    joint = roofline_us(QWEN, Cell("joint", 64), H200, "uniform", 0)
    parts = [roofline_us(QWEN, Cell(role, 64), H200, "uniform", 0) for role in ("up", "down")]
    assert joint == pytest.approx(sum(parts))
    skewed = roofline_us(QWEN, Cell("up", 64), H200, "zipf:1.5", 0)
    assert skewed < parts[0]


def test_rates_are_kept_by_gpu_driver_torch_and_compute_type(tmp_path: Path) -> None:
    store = RateStore(tmp_path / "deep" / "rates.json")
    key = rate_key("NVIDIA H200", "580.1", "2.11.0", QWEN)
    assert store.load(key) is None
    store.save(key, H200)
    other = rate_key("NVIDIA H200", "580.1", "2.11.0", QWEN.replace(dtype="fp8_w8a8"))
    store.save(other, Rates(4300.0, 4200.0, None))
    again = RateStore(store.path)
    assert again.load(key) == H200 and again.load(other) == Rates(4300.0, 4200.0, None)
    assert key != other and again.load(rate_key("NVIDIA H100", "580.1", "2.11.0", QWEN)) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 9, "rates": {}}', '{"format": 2, "rates": {"k": {}}}'])
def test_a_cache_that_cannot_be_read_is_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(content)
    store = RateStore(path)
    assert store.load("k") is None
    store.save("k", H200)
    assert store.load("k") == H200


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = RateStore(blocked / "rates.json")
    store.save("k", H200)
    assert store.load("k") is None


def test_bytes_of_a_launch_by_routing_and_role(tmp_path: Path) -> None:
    shape = MoEShape(64, 4, 256, 128)
    up, down = (launch_bytes(shape, Cell(role, 16), "uniform") for role in ("up", "down"))
    assert up == drawn_work(shape, "up", 16, "uniform", 0).bytes
    assert launch_bytes(shape, Cell("joint", 16), "uniform, warm L2") == up + down
    assert launch_bytes(shape, Cell("up", 16), "zipf:2") < up, "popular experts are read once"
    assert launch_bytes(shape, Cell("up", 16), "file:0123456789abcdef") is None
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((16, 4), dtype=np.int32) + np.arange(4, dtype=np.int32))
    assert launch_bytes(shape, Cell("up", 16), f"file:{path}") < up
