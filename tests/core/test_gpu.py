from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt import GpuSpec
from moeopt.core.gpu import GPUS
from moeopt.errors import DeviceError, InvalidInputError, MoeoptError, UnknownGpuError

ALL = sorted(set(GPUS.values()), key=lambda g: g.name)


@pytest.mark.parametrize("gpu", ALL, ids=lambda g: g.name)
def test_round_trip_and_name(gpu: GpuSpec) -> None:
    assert GpuSpec.from_dict(json.loads(json.dumps(gpu.to_dict()))) == gpu
    assert GpuSpec.from_dict({"name": gpu.name}) == gpu
    for name in (gpu.name, gpu.name.upper(), gpu.name.replace(" ", "_"), gpu.name.removeprefix("NVIDIA ")):
        assert GpuSpec.by_name(name) is gpu


@pytest.mark.parametrize("gpu", ALL, ids=lambda g: g.name)
def test_limits_are_those_of_the_compute_capability(gpu: GpuSpec) -> None:
    """CUDA's programming guide: most shared memory of a block and an SM in KiB, and resident warps."""
    block, per_sm, warps = {
        80: (163, 164, 64), 89: (99, 100, 48), 90: (227, 228, 64), 100: (227, 228, 64), 120: (99, 100, 48),
        121: (99, 100, 48),
    }[gpu.sm]  # fmt: skip
    assert gpu.shared_memory_per_block_optin == block * 1024
    assert gpu.shared_memory_per_multiprocessor == per_sm * 1024
    assert gpu.warps_per_multiprocessor == warps
    assert gpu.registers_per_multiprocessor == 65536


@pytest.mark.parametrize("gpu", ALL, ids=lambda g: g.name)
def test_rates_are_plausible(gpu: GpuSpec) -> None:
    """fp8 and int8 are at least twice as fast as bf16, where there are tensor cores for them."""
    assert gpu.int8_tops >= 1.99 * gpu.bf16_tflops
    assert (gpu.fp8_tflops >= 1.99 * gpu.bf16_tflops) if gpu.sm >= 89 else gpu.fp8_tflops == 0
    assert gpu.l2_bytes < gpu.memory_bytes
    assert gpu.unified_memory == (gpu.name == "NVIDIA GB10")


def test_sm120() -> None:
    """The part that this project was asked for."""
    editions = [g for g in ALL if "RTX PRO 6000" in g.name]
    assert len(editions) == 3
    for gpu in editions:
        assert gpu.sm == 120 and gpu.multiprocessors == 188
        assert gpu.shared_memory_per_block_optin == 101_376
        assert gpu.l2_bytes == 128 * 1024**2
    assert GpuSpec.by_name("GB10").sm == 121
    # 188 SMs of 1,024 dense bf16 FLOP per clock at 2.617 GHz
    assert GpuSpec.by_name("RTX PRO 6000 Blackwell Workstation Edition").bf16_tflops == pytest.approx(503.8, abs=1)


def test_short_names_and_names_that_are_not_there() -> None:
    assert GpuSpec.by_name("h100").name == "NVIDIA H100 80GB HBM3"
    assert GpuSpec.by_name("A100").sm == 80
    assert GpuSpec.by_name("H20-3e").memory_bytes > GpuSpec.by_name("H20").memory_bytes
    for name in ("", "H2000", "RTX PRO 6000"):
        with pytest.raises(UnknownGpuError, match=r"known GPUs are .*NVIDIA H200"):
            GpuSpec.by_name(name)


def test_a_header_may_name_a_known_gpu_and_say_only_what_differs() -> None:
    gpu = GpuSpec.from_dict(
        {"name": "NVIDIA H200", "compute_capability": [9, 0], "multiprocessors": 66, "color": "green"}
    )
    assert gpu.multiprocessors == 66 and gpu.bandwidth_gbps == 4800
    whole = {**GpuSpec.by_name("H200").to_dict(), "name": "NVIDIA B9000"}
    assert GpuSpec.from_dict(whole).name == "NVIDIA B9000"
    del whole["l2_bytes"]
    with pytest.raises(UnknownGpuError, match="'NVIDIA B9000' is not in the table and 'l2_bytes' is not given"):
        GpuSpec.from_dict(whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compute_capability": [9]}, "compute_capability is"),
        ({"compute_capability": 9}, "compute_capability is 9"),
        ({"compute_capability": ["x", 0]}, "compute_capability is"),
        ({"multiprocessors": "132"}, "multiprocessors is '132'"),
        ({"multiprocessors": True}, "multiprocessors is True"),
        ({"bandwidth_gbps": -1}, "bandwidth_gbps is -1"),
        ({"bf16_tflops": float("nan")}, "bf16_tflops is nan"),
        ({"l2_bytes": None}, "l2_bytes is None"),
    ],
)
def test_bad_fields(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        GpuSpec.from_dict({"name": "NVIDIA H200", **changes})


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
FIELDS = st.sampled_from(sorted(ALL[0].to_dict()))


@given(st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(FIELDS, x)))
def test_from_dict_of_anything(value: Any) -> None:
    try:
        GpuSpec.from_dict({"name": "NVIDIA H200", **value} if isinstance(value, dict) else value)
    except MoeoptError as error:
        assert "\n" not in str(error)


def test_no_gpu_is_one_line() -> None:
    import torch

    if torch.cuda.is_available():
        with pytest.raises(DeviceError, match="GPUs are visible"):
            GpuSpec.detect(1000)
    else:
        with pytest.raises(DeviceError, match=r"no CUDA GPU was found: .*--gpu recorded:FILE"):
            GpuSpec.detect()


@pytest.mark.gpu
def test_detected_gpu_agrees_with_the_table() -> None:
    gpu = GpuSpec.detect()
    known = GpuSpec.by_name(gpu.name)
    for field in (
        "compute_capability", "multiprocessors", "shared_memory_per_block_optin", "shared_memory_per_multiprocessor",
        "registers_per_multiprocessor", "warps_per_multiprocessor", "bandwidth_gbps", "bf16_tflops", "unified_memory",
    ):  # fmt: skip
        assert getattr(gpu, field) == getattr(known, field), field
    assert gpu.memory_bytes == pytest.approx(known.memory_bytes, rel=0.08)
    assert gpu.l2_bytes == pytest.approx(known.l2_bytes, rel=0.05)
