"""Config files are written whole, merged per batch size, and never hold what an engine rejects."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.errors import ExportError, InvalidInputError
from moeopt.export import check_pair, export_configs, read_config_file

SHAPE = MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128))
BF16 = MoEShape(256, 8, 3072, 256)
GPU = "NVIDIA H200"
SMALL = LaunchConfig(16, 64, 128, 1, 4, 3)
WIDE = LaunchConfig(16, 128, 64, 16, 8, 2)
LARGE = LaunchConfig(64, 128, 128, 8, 4, 3)


def sglang(directory: Path, up, down=None, **options) -> list[Path]:
    return export_configs("sglang", directory, SHAPE, GPU, "3.6.0", ConfigTable.of(up, down), **options)


def entries(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text())


def test_sglang_writes_both_roles_where_the_engine_looks(tmp_path: Path) -> None:
    up, down = sglang(tmp_path, {64: SMALL, 1: SMALL}, {64: WIDE, 1: SMALL})
    name = "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]"
    assert up == tmp_path / "configs" / "triton_3_6_0" / f"{name}.json"
    assert down == tmp_path / "configs" / "triton_3_6_0" / f"{name}_down.json"
    assert entries(up) == {"1": SMALL.to_dict(), "64": SMALL.to_dict()}
    assert entries(down) == {"1": SMALL.to_dict(), "64": WIDE.to_dict()}
    assert list(entries(up)) == ["1", "64"]
    assert sorted(p.name for p in up.parent.iterdir()) == sorted([up.name, down.name])


def test_vllm_writes_one_flat_file(tmp_path: Path) -> None:
    (path,) = export_configs("vllm", tmp_path / "new", SHAPE, "NVIDIA H200 NVL", "3.6.0", ConfigTable.of({8: SMALL}))
    assert path == tmp_path / "new" / "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    assert entries(path) == {"8": SMALL.to_dict()}


def test_joint_mode_writes_the_same_down_file(tmp_path: Path) -> None:
    up, down = sglang(tmp_path, {1: SMALL})
    assert up.read_bytes() == down.read_bytes()


def test_merging_keeps_other_batch_sizes(tmp_path: Path) -> None:
    sglang(tmp_path, {1: SMALL, 512: LARGE}, {1: WIDE, 512: LARGE})
    up, down = sglang(tmp_path, {64: SMALL, 512: SMALL}, {64: WIDE, 512: WIDE})
    assert entries(up) == {"1": SMALL.to_dict(), "64": SMALL.to_dict(), "512": SMALL.to_dict()}
    assert entries(down) == {"1": WIDE.to_dict(), "64": WIDE.to_dict(), "512": WIDE.to_dict()}


def test_replace_drops_other_batch_sizes(tmp_path: Path) -> None:
    sglang(tmp_path, {1: SMALL, 512: LARGE})
    up, down = sglang(tmp_path, {64: SMALL}, {64: WIDE}, replace=True)
    assert entries(up) == {"64": SMALL.to_dict()}
    assert entries(down) == {"64": WIDE.to_dict()}


def test_merging_keeps_keys_that_moeopt_does_not_know(tmp_path: Path) -> None:
    up, _ = sglang(tmp_path, {1: SMALL})
    up.write_text(json.dumps({"1": {**SMALL.to_dict(), "num_ctas": 1}}))
    sglang(tmp_path, {64: SMALL})
    assert entries(up)["1"] == {**SMALL.to_dict(), "num_ctas": 1}


def test_an_up_file_without_a_down_file_keeps_its_meaning(tmp_path: Path) -> None:
    """SGLang used the up entries for down: they go into the new down file beside the new ones."""
    _, down = sglang(tmp_path, {1: SMALL, 512: LARGE})
    down.unlink()
    sglang(tmp_path, {64: SMALL}, {64: WIDE})
    assert entries(down) == {"1": SMALL.to_dict(), "64": WIDE.to_dict(), "512": LARGE.to_dict()}


def test_files_with_other_batch_sizes_are_brought_together(tmp_path: Path) -> None:
    up, down = sglang(tmp_path, {1: SMALL, 512: LARGE})
    down.write_text(json.dumps({"16": WIDE.to_dict()}))
    sglang(tmp_path, {64: SMALL}, {64: WIDE})
    assert list(entries(up)) == list(entries(down)) == ["1", "16", "64", "512"]
    assert check_pair(read_config_file(up), read_config_file(down)) == []
    assert entries(down)["512"] == {**WIDE.to_dict(), "BLOCK_SIZE_M": 64}


def test_vllm_keeps_the_noted_triton_version_only_if_it_is_the_same(tmp_path: Path) -> None:
    def again(version: str) -> dict:
        (path,) = export_configs("vllm", tmp_path, BF16, GPU, version, ConfigTable.of({8: SMALL}))
        return entries(path)

    again("3.6.0")
    path = tmp_path / "E=256,N=256,device_name=NVIDIA_H200.json"
    path.write_text(json.dumps({"triton_version": "3.6.0", "1": SMALL.to_dict()}))
    assert list(again("3.6.0")) == ["triton_version", "1", "8"]
    assert list(again("3.7.0")) == ["1", "8"]


@pytest.mark.parametrize("text", ["", "{", '{"1": 3}', '{"triton_version": "3.6.0"}', '{"a": {}}', "\udcff"])
def test_a_broken_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    up, _ = sglang(tmp_path, {1: SMALL})
    up.write_bytes(text.encode("utf-8", "surrogateescape"))
    before = up.read_bytes()
    with pytest.raises(ExportError, match="broken") as caught:
        sglang(tmp_path, {64: SMALL})
    assert "\n" not in str(caught.value)
    assert up.read_bytes() == before
    sglang(tmp_path, {64: SMALL}, replace=True)
    assert entries(up) == {"64": SMALL.to_dict()}


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = sglang(tmp_path, {1: SMALL})
    before = up.read_bytes(), down.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ExportError, match="No space left on device"):
        sglang(tmp_path, {64: SMALL})
    monkeypatch.undo()
    assert (up.read_bytes(), down.read_bytes()) == before
    assert len(list(up.parent.iterdir())) == 2


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written") as caught:
        sglang(tmp_path / "file", {1: SMALL})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "up", "down", "words"),
    [
        ("sglang", {}, None, "no tuned batch sizes"),
        ("sglang", {0: SMALL}, None, "at least 1"),
        ("sglang", {True: SMALL}, None, "at least 1"),
        ("sglang", {1: SMALL}, {2: SMALL}, "one role only"),
        ("sglang", {1: SMALL}, {1: LARGE}, "BLOCK_SIZE_M"),
        ("sglang", {1: LaunchConfig(16, 64, 256, 1, 4, 3)}, None, "block_k"),
        ("vllm", {1: LaunchConfig(16, 64, 256, 1, 4, 3)}, None, "block_k"),
        ("vllm", {1: SMALL}, {1: WIDE}, "joint"),
        ("vllm", {1: LaunchConfig(16, 64, 64, 1, 4, 3, use_tma=True)}, None, "USE_TMA"),
    ],
)
def test_what_an_engine_cannot_use_is_refused(tmp_path: Path, engine: str, up, down, words: str) -> None:
    with pytest.raises((ExportError, InvalidInputError), match=words) as caught:
        export_configs(engine, tmp_path / "out", SHAPE, GPU, "3.6.0", ConfigTable.of(up, down))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_versions_with_a_suffix_go_into_a_directory_that_the_loader_understands(tmp_path: Path) -> None:
    up, _ = export_configs("sglang", tmp_path, SHAPE, GPU, "3.6.0+git1234", ConfigTable.of({1: SMALL}))
    assert up.parent.name == "triton_3_6_0"
    with pytest.raises(ExportError, match="Triton version"):
        export_configs("sglang", tmp_path, SHAPE, GPU, "nightly", ConfigTable.of({1: SMALL}))


def test_two_exports_at_once_lose_nothing(tmp_path: Path) -> None:
    threads = [threading.Thread(target=sglang, args=(tmp_path, {m: SMALL}, {m: WIDE})) for m in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    up, down = sglang(tmp_path, {32: SMALL})
    assert len(entries(up)) == len(entries(down)) == 17


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    up, _ = sglang(tmp_path, {1: SMALL})
    plain = tmp_path / "plain"
    plain.write_text("")
    assert up.stat().st_mode == plain.stat().st_mode


def test_vllm_gets_split_k_where_its_launch_needs_it(tmp_path: Path) -> None:
    config = LaunchConfig(16, 64, 128, 1, 4, 3)
    int4 = MoEShape(8, 2, 256, 128, "int4_w4a16", group_size=128)
    for engine, shape, expected in (
        ("vllm", int4, True),
        ("sglang", int4, False),
        ("vllm", MoEShape(8, 2, 256, 128), False),
    ):
        path = export_configs(engine, tmp_path / engine, shape, "NVIDIA H200", "3.6.0", ConfigTable.of({16: config}))[0]
        assert ("SPLIT_K" in json.loads(path.read_text())["16"]) is expected
