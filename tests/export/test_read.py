"""Reading back: one clear line for each thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.errors import InvalidInputError
from moeopt.export import check_pair, read_config_file
from moeopt.export.read import to_config

NAME = "E=256,N=256,device_name=NVIDIA_H200.json"
BLOCK = "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
GOOD = LaunchConfig(16, 64, 128, 1, 4, 3).to_dict()


def sglang(tmp_path: Path, data: object, name: str = NAME, place: str = "triton_3_6_0") -> Path:
    path = tmp_path / "configs" / place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def codes(path: Path, **options) -> list[tuple[str, str, int | None]]:
    problems = read_config_file(path, **options).problems
    assert all("\n" not in str(p) for p in problems)
    return [(p.severity, p.code, p.batch_size) for p in problems]


def test_a_sound_file_has_no_problem(tmp_path: Path) -> None:
    file = read_config_file(sglang(tmp_path, {"1": GOOD, "64": GOOD}))
    assert file.problems == () and file.usable and file.engine == "sglang"
    assert file.configs() == {1: LaunchConfig(16, 64, 128, 1, 4, 3), 64: LaunchConfig(16, 64, 128, 1, 4, 3)}
    assert file.nearest(40) == GOOD


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"SPLIT_K": 1}, "unknown_key"),
        ({"waves_per_eu": 0}, "unknown_key"),
        ({"BLOCK_SIZE_X": 4}, "unknown_key"),
        ({"BLOCK_SIZE_M": None}, "value"),
        ({"BLOCK_SIZE_M": 48}, "value"),
        ({"BLOCK_SIZE_M": True}, "value"),
        ({"BLOCK_SIZE_M": "16"}, "value"),
        ({"num_warps": 6}, "value"),
        ({"num_stages": 0}, "value"),
        ({"GROUP_SIZE_M": 0}, "value"),
        ({"USE_TMA": 1}, "value"),
        ({"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "num_stages": 5}, "cannot_run"),
    ],
)
def test_a_bad_entry_is_an_error_with_its_batch_size(tmp_path: Path, change: dict, problem: str) -> None:
    path = sglang(tmp_path, {"1": GOOD, "64": {**GOOD, **change}})
    assert codes(path) == [("error", problem, 64)]


def test_a_missing_key_is_an_error_and_missing_warps_are_tritons(tmp_path: Path) -> None:
    short = {k: v for k, v in GOOD.items() if k.startswith("BLOCK") or k == "GROUP_SIZE_M"}
    assert codes(sglang(tmp_path, {"1": short, "2": short})) == []
    assert to_config(short) == LaunchConfig(16, 64, 128, 1, 4, 3)
    del short["BLOCK_SIZE_N"]
    assert codes(sglang(tmp_path, {"1": GOOD, "2": short})) == [("error", "missing_key", 2)]


def test_block_size_k_over_block_k_is_wrong_in_sglang_and_clamped_in_vllm(tmp_path: Path) -> None:
    data = {"1": GOOD, "2": {**GOOD, "BLOCK_SIZE_K": 256}}
    assert codes(sglang(tmp_path, data, BLOCK)) == [("error", "block_k", 2)]
    flat = tmp_path / BLOCK.replace(" ", "")
    flat.write_text(json.dumps(data))
    assert codes(flat) == [("warning", "block_k", 2)]


def test_triton_version_is_vllms_alone(tmp_path: Path) -> None:
    data = {"triton_version": "3.6.0", "1": GOOD, "2": GOOD}
    path = sglang(tmp_path, data)
    assert codes(path) == [("error", "triton_version", None)]
    flat = tmp_path / NAME
    flat.write_text(json.dumps(data))
    assert codes(flat, engine="vllm") == []
    assert read_config_file(flat, engine="vllm").triton_version == "3.6.0"


def test_split_k_is_vllms_alone_and_counts_as_one(tmp_path: Path) -> None:
    flat = tmp_path / NAME
    flat.write_text(json.dumps({"1": {**GOOD, "SPLIT_K": 1}, "2": {**GOOD, "SPLIT_K": 4}}))
    assert codes(flat, engine="vllm") == [("warning", "split_k", 2)]
    flat.write_text(json.dumps({"1": {**GOOD, "USE_TMA": True}, "2": GOOD}))
    assert codes(flat, engine="vllm") == [("error", "unknown_key", 1)]


@pytest.mark.parametrize("key", ["a", "0", "-1", "1.5", "", "1_000", "９", "99999999999"])
def test_keys_that_are_no_batch_size(tmp_path: Path, key: str) -> None:
    assert ("error", "key", None) in codes(sglang(tmp_path, {"1": GOOD, key: GOOD}))


@pytest.mark.parametrize(
    "text", ["", "  ", "[]", "{}", "null", "{", '{"1": ', "\ud83d".encode("utf-16", "surrogatepass")]
)
def test_what_is_no_file_of_configs(tmp_path: Path, text) -> None:
    path = sglang(tmp_path, "")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert codes(path) == [("error", "json", None)]


def test_a_repeated_key_is_a_warning(tmp_path: Path) -> None:
    entry = json.dumps(GOOD)
    assert codes(sglang(tmp_path, f'{{"1": {entry}, "2": {entry}, "1": {entry}}}')) == [("warning", "repeated", None)]


def test_one_batch_size_is_worth_a_note(tmp_path: Path) -> None:
    assert codes(sglang(tmp_path, {"64": GOOD})) == [("note", "one_key", None)]


def test_a_wrong_name_or_place(tmp_path: Path) -> None:
    both = {"1": GOOD, "2": GOOD}
    assert codes(sglang(tmp_path, both, "E=1,N=2.json"))[0] == ("error", "name", None)
    assert codes(sglang(tmp_path, both, BLOCK.replace(" ", "")))[0] == ("error", "name", None)
    assert codes(sglang(tmp_path, both, NAME.replace(".json", ",dtype=bf16.json"))) == [("error", "name", None)]
    assert codes(sglang(tmp_path, both, NAME, "triton_new"), engine="sglang") == [("error", "place", None)]


def test_the_gpu_of_the_name_or_a_given_one(tmp_path: Path) -> None:
    """76 KiB fit an H200 and not a GPU with 99 KiB; an unknown GPU is not judged."""
    data = {"1": GOOD, "2": {**GOOD, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "num_stages": 3}}
    assert codes(sglang(tmp_path, data)) == []
    small = GpuSpec.by_name("RTX PRO 6000 Blackwell Server Edition")
    assert codes(sglang(tmp_path, data), gpu=small) == [("error", "cannot_run", 2)]
    assert codes(sglang(tmp_path, data, NAME.replace("H200", "RTX_PRO_6000_Blackwell_Server_Edition"))) == [
        ("error", "cannot_run", 2)
    ]
    assert codes(sglang(tmp_path, data, NAME.replace("H200", "X1"))) == []


def test_weight_only_limits_are_a_guess(tmp_path: Path) -> None:
    data = {"1": GOOD, "2": {**GOOD, "BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "num_stages": 5}}
    name = NAME.replace(".json", ",dtype=int8_w8a16.json")
    assert codes(sglang(tmp_path, data, name)) == [("warning", "cannot_run", 2)]


def test_amd_files_keep_their_keys(tmp_path: Path) -> None:
    data = {"1": {**GOOD, "waves_per_eu": 0, "kpack": 1}, "2": GOOD}
    assert codes(sglang(tmp_path, data, NAME.replace("NVIDIA_H200", "AMD_Instinct_MI300X"))) == []


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_config_file(tmp_path / "no.json")


def test_a_pair_with_different_block_size_m(tmp_path: Path) -> None:
    up = read_config_file(sglang(tmp_path, {"1": GOOD, "64": {**GOOD, "BLOCK_SIZE_M": 32}}))
    down = read_config_file(sglang(tmp_path, {"1": GOOD, "64": GOOD}, NAME.replace(".json", "_down.json")))
    (problem,) = check_pair(up, down)
    assert (problem.code, problem.severity, problem.batch_size) == ("block_m", "warning", 64)
    assert "M=33" in problem.message
    assert check_pair(up, up) == []


def test_a_pair_with_other_batch_sizes_clashes_only_where_it_does(tmp_path: Path) -> None:
    up = read_config_file(sglang(tmp_path, {"1": GOOD, "64": {**GOOD, "BLOCK_SIZE_M": 32}}))
    other = {"1": GOOD, "32": GOOD, "64": {**GOOD, "BLOCK_SIZE_M": 32}}
    down = read_config_file(sglang(tmp_path, other, NAME.replace(".json", "_down.json")))
    (problem,) = check_pair(up, down)
    assert "(16 of 8,192 batch sizes)" in problem.message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=8),
        lambda x: (
            st.lists(x)
            | st.dictionaries(st.text(max_size=6) | st.sampled_from(["1", "64", "BLOCK_SIZE_M", "USE_TMA"]), x)
        ),
        max_leaves=12,
    )
)
def test_nothing_in_a_file_crashes_the_reader(tmp_path: Path, content) -> None:
    path = sglang(tmp_path, "")
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    file = read_config_file(path)
    if file.usable:
        file.configs()
