"""Files get where the engine reads, and other models keep theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.errors import ExportError
from moeopt.export import install_configs, start_line
from moeopt.export.install import bundled_directory

SHAPE = MoEShape(256, 8, 3072, 256)
CONFIG = LaunchConfig(16, 64, 128, 1, 4, 3)
NAME = "E=256,N=256,device_name=NVIDIA_H200.json"
SHIPPED = "E=8,N=3584,device_name=NVIDIA_L40S.json"


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    package = tmp_path / "site" / "sglang"
    place = package / "srt/layers/moe/moe_runner/triton_utils/configs/triton_3_5_1"
    place.mkdir(parents=True)
    (place / SHIPPED).write_text(json.dumps({"1": CONFIG.to_dict()}))
    (place / NAME).write_text(json.dumps({"2": CONFIG.to_dict()}))
    return package


def install(package: Path | None, engine: str = "sglang", **environment: str):
    return install_configs(
        engine,
        SHAPE,
        "NVIDIA H200",
        "3.6.0",
        ConfigTable.of({1: CONFIG}),
        package=package,
        environment=environment,
        model="/m",
    )


def test_beside_what_sglang_ships(sglang: Path) -> None:
    done = install(sglang)
    bundled = bundled_directory("sglang", sglang)
    assert bundled is not None and done.directory == bundled
    assert done.paths[0] == bundled / "configs/triton_3_6_0" / NAME
    assert "beside the files that sglang ships" in done.said
    assert done.start == "python -m sglang.launch_server --model-path /m --moe-runner-backend triton"


def test_the_variables_directory_gets_links_to_what_sglang_ships(sglang: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    done = install(sglang, SGLANG_MOE_CONFIG_DIR=str(mine))
    shipped = mine / "configs/triton_3_5_1" / SHIPPED
    assert shipped.is_symlink() and json.loads(shipped.read_text()) == {"1": CONFIG.to_dict()}
    assert "linked 2 files" in done.said
    assert done.start.startswith(f"SGLANG_MOE_CONFIG_DIR={mine} python")
    assert "linked 2 files" in install(sglang, SGLANG_MOE_CONFIG_DIR=str(mine)).said


def test_links_of_an_sglang_that_is_gone_are_renewed(sglang: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    install(sglang, SGLANG_MOE_CONFIG_DIR=str(mine))
    moved = sglang.rename(tmp_path / "other")
    install(moved, SGLANG_MOE_CONFIG_DIR=str(mine))
    assert (mine / "configs/triton_3_5_1" / SHIPPED).exists()


def test_writing_over_a_link_leaves_what_it_points_to(sglang: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    install(sglang, SGLANG_MOE_CONFIG_DIR=str(mine))
    done = install_configs(
        "sglang", SHAPE, "NVIDIA H200", "3.5.1", ConfigTable.of({1: CONFIG}), package=sglang,
        environment={"SGLANG_MOE_CONFIG_DIR": str(mine)},
    )  # fmt: skip
    assert sorted(json.loads(done.paths[0].read_text())) == ["1", "2"]
    bundled = bundled_directory("sglang", sglang)
    assert bundled is not None
    assert list(json.loads((bundled / "configs/triton_3_5_1" / NAME).read_text())) == ["2"]


def test_moeopts_own_directory_where_the_engine_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    done = install(None)
    assert done.directory == tmp_path / "data/moeopt/configs/sglang"
    assert "is not installed here" in done.said and "--engine-dir" in done.said
    assert done.start.startswith(f"SGLANG_MOE_CONFIG_DIR={done.directory} ")


def test_vllm_adds_to_what_it_ships(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "model_executor/layers/fused_moe/configs").mkdir(parents=True)
    done = install(package, "vllm")
    assert done.paths == (package / "model_executor/layers/fused_moe/configs" / NAME,)
    done = install(package, "vllm", VLLM_TUNED_CONFIG_FOLDER=str(tmp_path / "mine"))
    assert done.paths == (tmp_path / "mine" / NAME,)
    assert done.start == f"VLLM_TUNED_CONFIG_FOLDER={tmp_path / 'mine'} vllm serve /m --moe-backend triton"


def test_a_directory_that_cannot_be_linked_into(sglang: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "configs").mkdir(parents=True)
    (mine / "configs/triton_3_5_1").write_text("")
    with pytest.raises(ExportError, match="by hand") as caught:
        install(sglang, SGLANG_MOE_CONFIG_DIR=str(mine))
    assert "\n" not in str(caught.value)


def test_start_lines_name_what_makes_triton_run(tmp_path: Path) -> None:
    int4 = MoEShape(64, 8, 2048, 512, "int4_w4a16", group_size=128)
    assert start_line("sglang", tmp_path, int4).endswith("--model-path MODEL --quantization moe_wna16")
    assert start_line("vllm", tmp_path / "a b", SHAPE).startswith(f"VLLM_TUNED_CONFIG_FOLDER='{tmp_path / 'a b'}' vllm")
