from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
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
        80: (163, 164, 64), 86: (99, 100, 48), 89: (99, 100, 48), 90: (227, 228, 64), 100: (227, 228, 64),
        103: (227, 228, 64), 120: (99, 100, 48), 121: (99, 100, 48),
    }[gpu.sm]  # fmt: skip
    assert gpu.shared_memory_per_block_optin == block * 1024
    assert gpu.shared_memory_per_multiprocessor == per_sm * 1024
    assert gpu.warps_per_multiprocessor == warps
    assert gpu.registers_per_multiprocessor == 65536


@pytest.mark.parametrize("gpu", ALL, ids=lambda g: g.name)
def test_rates_are_plausible(gpu: GpuSpec) -> None:
    """fp8 and int8 are at least twice as fast as bf16, where there are tensor cores for them: 10.3 gave up int8."""
    assert gpu.int8_tops >= 1.99 * gpu.bf16_tflops if gpu.sm != 103 else 0 < gpu.int8_tops < gpu.bf16_tflops
    assert (gpu.fp8_tflops >= 1.99 * gpu.bf16_tflops) if gpu.sm >= 89 else gpu.fp8_tflops == 0
    assert gpu.l2_bytes < gpu.memory_bytes
    assert gpu.unified_memory == (gpu.name == "NVIDIA GB10")


@pytest.mark.parametrize("gpu", ALL, ids=lambda g: g.name)
def test_a_tensor_core_does_what_its_generation_can(gpu: GpuSpec) -> None:
    """The bf16 rate over SMs and FLOP per clock is a clock that such a chip runs at.

    GeForce cards accumulate float32 at half the rate; H20, L20 and L40 are cut down to less than their cores could.
    """
    full = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 1024, 121: 1024}[gpu.sm]
    flop = full // 2 if "GeForce" in gpu.name else full
    ghz = gpu.bf16_tflops * 1e3 / gpu.multiprocessors / flop
    cut = {"NVIDIA H20", "NVIDIA H20-3e", "NVIDIA L20", "NVIDIA L40"}
    assert (ghz < 1.3) if gpu.name in cut else 1.35 < ghz < 2.7


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
    assert GpuSpec.by_name("DGX Spark").name == "NVIDIA GB10"
    assert GpuSpec.by_name("b300").sm == 103
    assert GpuSpec.by_name("H20-3e").memory_bytes > GpuSpec.by_name("H20").memory_bytes
    for name in ("", "Z9"):
        with pytest.raises(UnknownGpuError, match=r"known GPUs are .*NVIDIA H200.*; describe it by hand, --gpu name="):
            GpuSpec.by_name(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rtx pro 6000", [f"NVIDIA RTX PRO 6000 Blackwell {e}Edition" for e in ("Server ", "Workstation ")]),
        ("RTX PRO 5000", ["NVIDIA RTX PRO 5000 Blackwell", "NVIDIA RTX PRO 5000 72GB Blackwell"]),
        ("A100 PCIe", ["NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB"]),
        ("GH200", ["NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"]),
        ("5090", ["NVIDIA GeForce RTX 5090"]),
        ("H2000", ["NVIDIA H200"]),
        ("RTX 6000 MIG 1g.12gb", ["NVIDIA RTX PRO 6000 Blackwell Server Edition"]),
    ],
)
def test_near_misses_are_proposed(name: str, meant: list[str]) -> None:
    with pytest.raises(UnknownGpuError) as error:
        GpuSpec.by_name(name)
    said = str(error.value)
    assert said.startswith(f"GPU {name!r} is unknown: did you mean ") and "\n" not in said
    assert all(one in said for one in meant) and "known GPUs" not in said


MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@pytest.mark.parametrize(
    ("name", "board", "multiprocessors", "share"),
    [
        (MIG, "NVIDIA H100 80GB HBM3", 16, 1 / 8),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "NVIDIA H100 80GB HBM3", 16, 1 / 8),
        ("NVIDIA H200 MIG 1g.35gb", "NVIDIA H200", 26, 2 / 8),
        ("NVIDIA_A100-SXM4-40GB_MIG_3g.20gb", "NVIDIA A100-SXM4-40GB", 42, 4 / 8),
        ("nvidia a100 80GB pcie mig 7g.80gb", "NVIDIA A100 80GB PCIe", 98, 1),
        ("NVIDIA A30 MIG 2g.12gb", "NVIDIA A30", 28, 2 / 4),
        ("RTX PRO 6000 Blackwell Server Edition MIG 2g.48gb", "RTX PRO 6000 Blackwell Server Edition", 94, 1 / 2),
        ("GRID A100D-1-10C", "NVIDIA A100 80GB PCIe", 14, 1 / 8),
        ("NVIDIA H100XM-1-10CME", "NVIDIA H100 80GB HBM3", 16, 1 / 8),
    ],
)
def test_a_mig_instance_has_its_share(name: str, board: str, multiprocessors: int, share: float) -> None:
    """Multiprocessors as ``nvidia-smi mig -lgip`` shows them, memory as the MIG user guide has it."""
    part, whole = GpuSpec.by_name(name), GpuSpec.by_name(board)
    assert part.name == " ".join(name.replace("_", " ").split()) and part.compute_capability == whole.compute_capability
    assert part.multiprocessors == multiprocessors
    assert part.memory_bytes == whole.memory_bytes * share and part.l2_bytes == int(whole.l2_bytes * share)
    assert part.bandwidth_gbps == pytest.approx(whole.bandwidth_gbps * share)
    assert part.bf16_tflops == pytest.approx(whole.bf16_tflops * multiprocessors / whole.multiprocessors)
    assert part.shared_memory_per_block_optin == whole.shared_memory_per_block_optin


@pytest.mark.parametrize(
    ("name", "board", "gib"),
    [
        ("GRID A100D-40C", "NVIDIA A100 80GB PCIe", 40),
        ("GRID A100X-20C", "NVIDIA A100-SXM4-40GB", 20),
        ("NVIDIA L40S-48C", "NVIDIA L40S", 48),
        ("NVIDIA H100L-94C", "NVIDIA H100 NVL", 94),
        ("NVIDIA A10-8Q", "NVIDIA A10", 8),
    ],
)
def test_a_virtual_gpu_has_all_but_its_memory(name: str, board: str, gib: int) -> None:
    whole = GpuSpec.by_name(board)
    assert GpuSpec.by_name(name) == replace(whole, name=name, memory_bytes=gib * 1024**3)


@pytest.mark.parametrize("name", ["NVIDIA B200 MIG 3g.90gb", "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb"])
def test_a_part_of_unknown_size_says_what_to_add(name: str) -> None:
    with pytest.raises(UnknownGpuError) as error:
        GpuSpec.by_name(name)
    said = str(error.value)
    assert "multiprocessors are not known" in said and f'--gpu "name={name},multiprocessors=N"' in said
    part = GpuSpec.named(f"name={name},multiprocessors=60")
    whole = GpuSpec.by_name(name.split(" MIG ")[0])
    assert part.multiprocessors == 60 and part.memory_bytes == whole.memory_bytes / 2
    assert part.bf16_tflops == pytest.approx(whole.bf16_tflops * 60 / whole.multiprocessors)


BY_HAND = (
    "name=NVIDIA X1, compute_capability=12.0, multiprocessors=156, memory_bytes=84GiB, l2_bytes=112 MiB, "
    "bandwidth_gbps=1344.5, bf16_tflops=400, fp8_tflops=800, int8_tops=800"
)


def test_a_gpu_by_hand(tmp_path: Path) -> None:
    gpu = GpuSpec.named(BY_HAND)
    assert (gpu.name, gpu.sm, gpu.multiprocessors, gpu.bandwidth_gbps) == ("NVIDIA X1", 120, 156, 1344.5)
    assert (gpu.memory_bytes, gpu.l2_bytes) == (84 * 1024**3, 112 * 1024**2)
    assert (gpu.shared_memory_per_block_optin, gpu.warps_per_multiprocessor) == (101_376, 48)
    for capability in ("12.0", '"12.0"', "[12, 0]"):
        (tmp_path / "x1.toml").write_text(
            f'name = "NVIDIA X1"\ncompute_capability = {capability}\nmultiprocessors = 156\nmemory_bytes = "84GiB"\n'
            'l2_bytes = "112 MiB"\nbandwidth_gbps = 1344.5\nbf16_tflops = 400\nfp8_tflops = 800\nint8_tops = 800\n'
        )
        assert GpuSpec.named(str(tmp_path / "x1.toml")) == gpu


def test_a_gpu_by_hand_may_be_like_another() -> None:
    gpu = GpuSpec.named("name=NVIDIA GeForce RTX 5090 D,like=RTX 5090,bf16_tflops=148,unified_memory=false")
    like = GpuSpec.by_name("RTX 5090")
    assert gpu == replace(like, name="NVIDIA GeForce RTX 5090 D", bf16_tflops=148.0)
    assert GpuSpec.named("name=NVIDIA H200,multiprocessors=100").bandwidth_gbps == 4800


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("multiprocessors=12", "the GPU's name is missing: give it as torch reports it"),
        ("name=X,cores=3", "GPU key 'cores' is unknown: the keys are .*bandwidth_gbps.*like.*multiprocessors"),
        ("name=X,compute_capability=12.0", "GPU 'X' is not in the table and 'multiprocessors' is not given: give it"),
        ("name=X,like=Z9", "GPU 'Z9' is unknown: known GPUs are"),
        ("name=X,like=H200,multiprocessors=many", "multiprocessors is 'many': give a whole number of at least 0"),
        ("name=X,like=H200,multiprocessors=1.5", "multiprocessors is 1.5: give a whole number"),
        ("name=X,like=H200,l2_bytes=5 parsecs", "l2_bytes is '5 parsecs': give a whole number"),
        ("name=X,like=H200,compute_capability=nine", "compute_capability is 'nine': give two numbers such as"),
        ("name=X,like=H200,bf16_tflops=nan", "bf16_tflops is nan: give a number of at least 0"),
        ("name=X,like=H200,unified_memory=yes", "unified_memory is 'yes': give true or false"),
        ("name=X,like=H200,12", "'12' of the GPU is not key=value: give it as in name="),
        ("name=X,name=Y", "name of the GPU is given twice"),
        ("name=X,compute_capability=19.0,multiprocessors=1,memory_bytes=1,l2_bytes=1,bandwidth_gbps=1,bf16_tflops=1",
         "'shared_memory_per_block_optin' is not given"),
        ("no/such.toml", "no/such.toml: the GPU's file cannot be read .*give a TOML file"),
    ],
)  # fmt: skip
def test_a_bad_gpu_by_hand_is_one_line(given: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as error:
        GpuSpec.named(given)
    assert "\n" not in str(error.value)


def test_a_bad_file_of_a_gpu_is_named(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    for text, said in (("name = ", "not TOML"), ('cores = 3\nname = "X"', "GPU key 'cores' is unknown")):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match=f"card.toml: {said}"):
            GpuSpec.named(str(path))


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
