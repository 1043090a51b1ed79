"""Which file an engine reads, and what lies beside it in vain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.errors import InvalidInputError
from moeopt.export import ConfigName, export_configs, find_config_files, import_configs
from moeopt.export.lookup import config_root, guess_engine
from moeopt.export.names import RTX_PRO_6000_EDITIONS

SHAPE = MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128))
GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
CONFIG = LaunchConfig(16, 64, 128, 1, 4, 3)
OTHER = LaunchConfig(16, 128, 64, 8, 4, 2)


def write(root: Path, engine: str = "sglang", version: str = "3.6.0", gpu: str = GPU, shape: MoEShape = SHAPE):
    return export_configs(engine, root, shape, gpu, version, ConfigTable.of({1: CONFIG, 64: OTHER}))


def look(root: Path, engine: str = "sglang", version: str = "3.6.0"):
    return find_config_files(engine, root, ConfigName.of(engine, SHAPE, GPU), version)


def test_the_exact_file(tmp_path: Path) -> None:
    up, down = write(tmp_path)
    found = look(tmp_path)
    assert (found.up.path, found.up.how, found.down.path, found.down.how) == (up, "exact", down, "exact")
    assert found.tuned and found.near_misses == ()


def test_vllm_reads_one_flat_file(tmp_path: Path) -> None:
    (path,) = write(tmp_path, "vllm")
    found = look(tmp_path, "vllm")
    assert (found.up.path, found.down.path, found.down.how, found.tuned) == (path, path, "up_file", True)


def test_the_newest_other_triton_version_stands_in(tmp_path: Path) -> None:
    write(tmp_path, version="3.10.0")
    write(tmp_path, version="3.9.1")
    found = look(tmp_path)
    assert (found.up.how, found.up.version) == ("fallback", "3.10.0")
    assert not found.tuned
    assert found.up.asked.parent.name == "triton_3_6_0"
    # The older one is not read.
    assert [m.path.parent.name for m in found.near_misses] == ["triton_3_9_1"] * 2


def test_up_serves_down_where_there_is_no_down_file(tmp_path: Path) -> None:
    up, down = write(tmp_path)
    down.unlink()
    found = look(tmp_path)
    assert (found.down.how, found.down.path, found.tuned) == ("up_file", up, False)


def test_an_old_down_file_beside_a_new_up_file(tmp_path: Path) -> None:
    write(tmp_path, version="3.5.1")
    write(tmp_path)[1].unlink()
    found = look(tmp_path)
    assert (found.up.how, found.down.how, found.down.version) == ("exact", "fallback", "3.5.1")


@pytest.mark.parametrize(
    ("changes", "gpu", "words"),
    [
        ({"intermediate_size": 512}, GPU, "N is 512, asked is 256 (twice"),
        ({"intermediate_size": 1024}, GPU, "another tensor-parallel size"),
        ({"intermediate_size": 300}, GPU, "N is 300, asked is 256"),
        ({"num_experts": 257}, GPU, "with a fused shared expert"),
        ({"num_experts": 255}, GPU, "without the fused shared expert"),
        ({"num_experts": 64}, GPU, "another expert-parallel size"),
        ({"block_shape": None}, GPU, "block_shape is none, asked is [128, 128]"),
        ({}, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "the same silicon under another name"),
        ({}, "NVIDIA H200", "it is for NVIDIA_H200"),
    ],
)
def test_near_misses_say_how_they_differ(tmp_path: Path, changes: dict, gpu: str, words: str) -> None:
    write(tmp_path, gpu=gpu, shape=SHAPE.replace(**changes))
    found = look(tmp_path)
    assert found.up.how == "missing" and found.down.how == "missing"
    assert found.near_misses
    assert all(words in miss.why for miss in found.near_misses)


def test_vllms_spelling_in_sglangs_directory_is_a_near_miss(tmp_path: Path) -> None:
    (path,) = write(tmp_path, "vllm")
    place = tmp_path / "configs" / "triton_3_6_0"
    place.mkdir(parents=True)
    path.rename(place / path.name)
    (miss,) = look(tmp_path).near_misses
    assert "spelled as vllm spells it" in miss.why


def test_a_file_in_the_wrong_place_is_a_near_miss(tmp_path: Path) -> None:
    up, down = write(tmp_path)
    up.rename(tmp_path / up.name)
    down.rename(tmp_path / "configs" / down.name)
    assert ["not in configs/triton_3_6_0" in m.why for m in look(tmp_path).near_misses] == [True, True]


def test_what_is_far_off_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, gpu="NVIDIA H200", shape=SHAPE.replace(num_experts=8, intermediate_size=4096))
    assert look(tmp_path).near_misses == ()


def test_a_directory_that_breaks_the_loader_is_seen_when_it_matters(tmp_path: Path) -> None:
    (tmp_path / "configs" / "triton_3_6_0_backup").mkdir(parents=True)
    assert look(tmp_path).obstacles == ("triton_3_6_0_backup",)
    write(tmp_path)
    assert look(tmp_path).obstacles == ()


def test_roots_and_whose_they_are(tmp_path: Path) -> None:
    write(tmp_path)
    place = tmp_path / "configs" / "triton_3_6_0"
    for directory in (tmp_path, tmp_path / "configs", place):
        assert config_root("sglang", directory) == tmp_path
        assert guess_engine(directory) == "sglang"
        assert look(directory).tuned
    flat = tmp_path / "flat"
    write(flat, "vllm")
    assert guess_engine(flat) == "vllm"
    with pytest.raises(InvalidInputError, match="not a directory"):
        guess_engine(tmp_path / "nothing")
    with pytest.raises(InvalidInputError, match="not a directory"):
        look(tmp_path / "nothing")


def test_import_gives_what_the_engine_launches(tmp_path: Path) -> None:
    write(tmp_path)
    existing = import_configs("sglang", tmp_path, SHAPE, GPU, "3.6.0")
    assert existing.up == existing.down == {1: CONFIG, 64: OTHER}
    assert [existing.at("up", m) for m in (1, 32, 33, 9000)] == [CONFIG, CONFIG, OTHER, OTHER]
    vllm = tmp_path / "vllm"
    write(vllm, "vllm")
    existing = import_configs("vllm", vllm, SHAPE, GPU, "3.6.0")
    assert existing.down is None and existing.at("down", 64) == OTHER


def test_down_runs_with_ups_block_size_m(tmp_path: Path) -> None:
    _, down = write(tmp_path)
    down.write_text(json.dumps({"1": {**OTHER.to_dict(), "BLOCK_SIZE_M": 32}, "64": OTHER.to_dict()}))
    existing = import_configs("sglang", tmp_path, SHAPE, GPU, "3.6.0")
    assert existing.at("down", 1) == OTHER
    assert [p.code for p in existing.problems] == ["block_m"]


def test_import_says_what_is_near_or_broken(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="not a directory"):
        import_configs("sglang", tmp_path / "none", SHAPE, GPU, "3.6.0")
    (tmp_path / "configs").mkdir()
    with pytest.raises(InvalidInputError, match="has no file for this shape"):
        import_configs("sglang", tmp_path, SHAPE, GPU, "3.6.0")
    up, _ = write(tmp_path, gpu=RTX_PRO_6000_EDITIONS[1])
    with pytest.raises(InvalidInputError, match="same silicon"):
        import_configs("sglang", tmp_path, SHAPE, GPU, "3.6.0")
    up, _ = write(tmp_path)
    up.write_text("{")
    with pytest.raises(InvalidInputError, match="not JSON") as caught:
        import_configs("sglang", tmp_path, SHAPE, GPU, "3.6.0")
    assert "\n" not in str(caught.value)


def test_a_block_that_vllm_cuts_is_imported_as_it_is_launched(tmp_path: Path) -> None:
    shape = MoEShape(64, 4, 2048, 256, "fp8_w8a8", block_shape=(128, 128))
    name = str(ConfigName.of("vllm", shape, "NVIDIA H200"))
    entry = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 1}
    (tmp_path / name).write_text(json.dumps({"1": entry, "64": {**entry, "BLOCK_SIZE_K": 64}}))
    found = import_configs("vllm", tmp_path, shape, "NVIDIA H200", "3.6.0")
    assert [found.at("up", m).block_size_k for m in (1, 64)] == [128, 64]


def test_a_root_may_be_called_configs(tmp_path: Path) -> None:
    """As an export into ``sglang:configs`` makes it."""
    root = tmp_path / "configs"
    write(root)
    assert config_root("sglang", root) == root and config_root("sglang", root / "configs") == root
    found = find_config_files("sglang", root, ConfigName.of("sglang", SHAPE, GPU), "3.6.0")
    assert found.tuned
