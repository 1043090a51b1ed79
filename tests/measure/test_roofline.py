"""What no kernel can beat."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell
from moeopt.kernels.work import Work
from moeopt.measure.base import DeviceSpec
from moeopt.measure.rates import Rates
from moeopt.measure.roofline import bound_us, drawn_work, launch_bytes, roofline_us

QWEN = MoEShape(256, 8, 3072, 256)
H200 = Rates(4300.0, 4200.0, 780.0)


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


def test_bytes_of_a_launch_by_routing_and_role(tmp_path: Path) -> None:
    shape = MoEShape(64, 4, 256, 128)
    up, down = (launch_bytes(shape, Cell(role, 16), "uniform") for role in ("up", "down"))
    assert up == drawn_work(shape, "up", 16, "uniform", 0).bytes
    assert launch_bytes(shape, Cell("joint", 16), "uniform") == up + down
    warm = Provenance("a test", "builtin", warm_l2=True)
    spec = DeviceSpec(shape, GpuSpec.by_name("H200"), warm, list, lambda *_: LaunchConfig(16, 32, 64, 1, 4, 3))
    assert spec.launch_bytes(Cell("joint", 16)) == up + down
    assert launch_bytes(shape, Cell("up", 16), "zipf:2") < up, "popular experts are read once"
    assert launch_bytes(shape, Cell("up", 16), "file:0123456789abcdef") is None
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((16, 4), dtype=np.int32) + np.arange(4, dtype=np.int32))
    assert launch_bytes(shape, Cell("up", 16), f"file:{path}") < up
