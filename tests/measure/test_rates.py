"""A GPU's rates, measured once."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeopt.core.shape import MoEShape
from moeopt.measure.rates import Rates, RateStore, rate_key

QWEN = MoEShape(256, 8, 3072, 256)
H200 = Rates(4300.0, 4200.0, 780.0)


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


def test_a_cache_that_cannot_be_written_is_not_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = RateStore(blocked / "rates.json")
    store.save("k", H200)
    assert store.load("k") is None
