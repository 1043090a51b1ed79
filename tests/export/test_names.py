"""File names: what the engines ask for, letter by letter."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt import engines
from moeopt.core.shape import MoEShape
from moeopt.errors import ExportError, InvalidInputError
from moeopt.export import ConfigName, device_relatives
from moeopt.export.names import RTX_PRO_6000_EDITIONS, full_gpu_name, nearest_key

BLOCK = MoEShape(257, 9, 6144, 256, "fp8_w8a8", (128, 128), shared_experts=1)
CHANNEL = MoEShape(160, 8, 5120, 192, "fp8_w8a8", per_channel=True)
INT4 = MoEShape(384, 8, 7168, 256, "int4_w4a16", group_size=32)
INT8 = MoEShape(64, 6, 2048, 352, "int8_w8a8")
LAYOUT = engines.get("sglang").layout


@pytest.mark.parametrize(
    ("engine", "shape", "gpu", "role", "name"),
    [
        ("sglang", MoEShape(8, 2, 4096, 3584), "NVIDIA L40S", "up", "E=8,N=3584,device_name=NVIDIA_L40S.json"),
        ("sglang", MoEShape(8, 2, 4096, 3584), "NVIDIA L40S", "down", "E=8,N=3584,device_name=NVIDIA_L40S_down.json"),
        ("vllm", MoEShape(8, 2, 4096, 3584), "NVIDIA L40S", "down", "E=8,N=3584,device_name=NVIDIA_L40S.json"),
        (
            "sglang",
            BLOCK,
            "NVIDIA H200",
            "down",
            "E=257,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]_down.json",
        ),
        (
            "vllm",
            BLOCK,
            "NVIDIA H200",
            "up",
            "E=257,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            "sglang",
            CHANNEL,
            "NVIDIA GB10",
            "up",
            "E=160,N=192,device_name=NVIDIA_GB10,dtype=fp8_w8a8,per_channel_quant=True.json",
        ),
        ("vllm", CHANNEL, "NVIDIA GB10", "up", "E=160,N=192,device_name=NVIDIA_GB10,dtype=fp8_w8a8.json"),
        ("sglang", INT4, "NVIDIA H20", "up", "E=384,N=128,device_name=NVIDIA_H20,dtype=int4_w4a16.json"),
        ("vllm", INT4, "NVIDIA H20", "up", "E=384,N=256,device_name=NVIDIA_H20,dtype=int4_w4a16.json"),
        ("sglang", INT8, "NVIDIA H20", "up", "E=64,N=352,device_name=NVIDIA_H20,dtype=int8_w8a8.json"),
        ("vllm", INT8, "NVIDIA H20", "up", "E=64,N=352,device_name=NVIDIA_H20.json"),
    ],
)
def test_the_name_an_engine_asks_for(engine: str, shape: MoEShape, gpu: str, role, name: str) -> None:
    assert str(ConfigName.of(engine, shape, gpu, role)) == name


@pytest.mark.parametrize(
    ("gpu", "sglang", "vllm"),
    [
        ("NVIDIA H200", "NVIDIA_H200", "NVIDIA_H200"),
        ("NVIDIA H200 NVL", "NVIDIA_H200_NVL", "NVIDIA_H200"),
        ("NVIDIA H20-3e", "NVIDIA_H20-3e", "NVIDIA_H20-3e"),
        ("NVIDIA GH200 480GB", "NVIDIA_GH200_480GB", "NVIDIA_GH200_480GB"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition",
            "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition",
        ),
        ("Some  GPU", "Some__GPU", "Some_GPU"),
    ],
)
def test_device_names(gpu: str, sglang: str, vllm: str) -> None:
    assert engines.get("sglang").names.device_name(gpu) == sglang
    assert engines.get("vllm").names.device_name(gpu) == vllm


def test_a_slash_is_an_underscore_for_vllm_and_cannot_be_for_sglang() -> None:
    assert engines.get("vllm").names.device_name("Board A/B") == "Board_A_B"
    with pytest.raises(InvalidInputError, match="slash"):
        engines.get("sglang").names.device_name("Board A/B")


@pytest.mark.parametrize("gpu", ["", " ", "a,b", "a\nb", "a\0b"])
def test_what_cannot_be_a_device_name(gpu: str) -> None:
    for engine in engines.names():
        with pytest.raises(InvalidInputError):
            engines.get(engine).names.device_name(gpu)


def test_the_three_editions_are_relatives() -> None:
    for name in RTX_PRO_6000_EDITIONS:
        assert set(device_relatives(name)) == set(RTX_PRO_6000_EDITIONS) - {name}
    assert device_relatives("NVIDIA_H200_NVL") == ("NVIDIA_H200",)
    assert device_relatives("NVIDIA_GB10") == ()


names = st.builds(
    ConfigName,
    engine=st.sampled_from(engines.names()),
    num_experts=st.integers(1, 1024),
    intermediate_size=st.integers(1, 65536),
    device=st.from_regex(r"[A-Z][A-Za-z0-9()-]{0,8}(_[A-Za-z0-9-]{1,8}){0,4}", fullmatch=True),
    dtype=st.sampled_from([None, "fp8_w8a8", "int8_w8a16", "int4_w4a16", "fp8_w8a16", "float32"]),
    block_shape=st.none() | st.tuples(st.integers(1, 512), st.integers(1, 512)),
    per_channel=st.booleans(),
    down=st.booleans(),
)


@given(names)
def test_what_is_built_is_parsed_back(name: ConfigName) -> None:
    if name.engine == "vllm":
        name = ConfigName(
            **{
                **{f: getattr(name, f) for f in name.__dataclass_fields__},
                "per_channel": False,
                "down": False,
                "device": engines.get("vllm").names.device_name(name.device),
            }
        )
    if name.device.endswith("_down"):
        return  # no GPU is called so, and nobody could tell it from a down file
    assert ConfigName.parse(str(name), name.engine) == name


@given(st.text(max_size=120))
def test_any_text_is_a_name_or_a_clear_error(text: str) -> None:
    try:
        name = ConfigName.parse(text)
    except InvalidInputError as error:
        assert "\n" not in str(error).replace(text, "")
    else:
        assert str(name) == text


@given(st.from_regex(r"E=[0-9]{1,4},N=[0-9]{1,4},device_name=[A-Za-z_ ]{1,20}(_down)?\.json", fullmatch=True))
def test_what_is_parsed_is_built_back(text: str) -> None:
    for engine in engines.names():
        try:
            name = ConfigName.parse(text, engine)
        except InvalidInputError:
            continue
        assert str(name) == text


@pytest.mark.parametrize(
    ("name", "engine", "words"),
    [
        ("config.json", None, "not a config file name"),
        ("E=8,N=14336,device_name=NVIDIA_A100", None, "not a config file name"),
        ("E=8,N=14336,device_name=NVIDIA A100.json", "sglang", "writes it"),
        ("E=8,N=14336,device_name=NVIDIA_H200_NVL.json", "vllm", "NVIDIA_H200"),
        ("E=08,N=14336,device_name=NVIDIA_A100.json", None, "writes it"),
        ("E=8,N=1,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json", "sglang", "no space"),
        ("E=8,N=1,device_name=X,dtype=fp8_w8a8,block_shape=[128, 128].json", "vllm", "a space"),
        ("E=8,N=1,device_name=X,dtype=fp8_w8a8_down.json", "vllm", "_down"),
        ("E=8,N=1,device_name=X,dtype=fp8_w8a8,block_shape=[128,128]_down.json", None, "no space inside block_shape"),
        ("E=8,N=1,device_name=X,block_shape=[0, 0].json", "sglang", "writes it"),
    ],
)
def test_names_that_are_never_asked_for(name: str, engine, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ConfigName.parse(name, engine)


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(InvalidInputError, match="'tgi'"):
        ConfigName.of("tgi", BLOCK, "NVIDIA H200")


def test_an_odd_intermediate_size_cannot_be_packed() -> None:
    with pytest.raises(InvalidInputError, match="odd"):
        ConfigName.of("sglang", MoEShape(8, 2, 128, 33, "int4_w4a16", group_size=32), "NVIDIA H200")


@pytest.mark.parametrize(
    ("version", "directory"),
    [
        ("3.6.0", "triton_3_6_0"),
        ("3.10.1", "triton_3_10_1"),
        ("3.7.0rc1", "triton_3_7_0"),
        ("3.6.0+git", "triton_3_6_0"),
    ],
)
def test_version_directories(version: str, directory: str) -> None:
    assert LAYOUT.place(Path("root"), version) == Path("root/configs") / directory
    assert LAYOUT.version_of(directory) is not None


def test_what_is_no_version() -> None:
    with pytest.raises(ExportError):
        LAYOUT.place(Path("root"), "main")
    for name in ("triton_", "triton_main", "triton_3_6_0_old", "triton-3", "3_6_0"):
        assert LAYOUT.version_of(name) is None


@given(st.lists(st.integers(1, 5000), min_size=1, unique=True), st.integers(1, 9000))
def test_the_nearest_key_is_the_first_of_the_nearest(keys: list[int], m: int) -> None:
    found = nearest_key(keys, m)
    nearest = [k for k in keys if abs(k - m) == min(abs(key - m) for key in keys)]
    assert found == nearest[0]


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("h200", "NVIDIA H200"),
        ("RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("NVIDIA H20-3e", "NVIDIA H20-3e"),
        ("NVIDIA_H200_NVL", "NVIDIA_H200_NVL"),
        ("Some GPU", "Some GPU"),
    ],
)
def test_short_gpu_names(name: str, full: str) -> None:
    assert full_gpu_name(name) == full
