"""What the doctor says of a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.doctor import Diagnosis, diagnose
from moeopt.errors import InvalidInputError
from moeopt.export import export_configs

SHAPE = MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128))
GPU = "NVIDIA H200"
CONFIG = LaunchConfig(16, 64, 128, 1, 4, 3)
UP = {1: CONFIG, 64: CONFIG}


def write(root: Path, engine: str = "sglang", version: str = "3.6.0", shape: MoEShape = SHAPE) -> list[Path]:
    return export_configs(engine, root, shape, GPU, version, ConfigTable.of(UP))


def codes(answer: Diagnosis) -> list[str]:
    return [f.code for f in answer.findings]


def test_a_sound_directory(tmp_path: Path) -> None:
    write(tmp_path)
    answer = diagnose(config_dir=tmp_path)
    assert (answer.code, answer.status, answer.findings) == ("checked", 0, ())
    assert answer.verdict.startswith("2 sglang config files")


def test_the_file_that_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, version="3.5.1")
    answer = diagnose(config_dir=tmp_path, shape=SHAPE, gpu_name=GPU, triton_version="3.6.0")
    assert (answer.code, answer.status, answer.next) == ("tuned", 0, ())
    answer = diagnose(config_dir=tmp_path, shape=SHAPE, gpu_name=GPU, triton_version="3.7.0")
    assert (answer.code, answer.status) == ("fallback", 1)
    assert "Triton 3.6.0" in answer.findings[0].message
    assert answer.next[0].startswith("moeopt tune --experts 256 --top-k 8 --hidden 6144 --intermediate 256")


def test_no_file_but_near_misses(tmp_path: Path) -> None:
    write(tmp_path, shape=SHAPE.replace(intermediate_size=512))
    answer = diagnose(config_dir=tmp_path, shape=SHAPE, gpu_name=GPU, triton_version="3.6.0")
    assert (answer.code, answer.status) == ("default", 1)
    assert "near_miss" in codes(answer)


def test_a_broken_file_that_is_read_and_one_that_is_not(tmp_path: Path) -> None:
    up, _ = write(tmp_path)
    other, _ = write(tmp_path, shape=SHAPE.replace(num_experts=8))
    other.write_text("{")
    answer = diagnose(config_dir=tmp_path, shape=SHAPE, gpu_name=GPU, triton_version="3.6.0")
    assert (answer.code, answer.status) == ("tuned", 0)
    assert [(f.severity, f.code) for f in answer.findings] == [("note", "json")]
    up.write_text(json.dumps({"1": {**CONFIG.to_dict(), "BLOCK_SIZE_K": 256}, "2": CONFIG.to_dict()}))
    answer = diagnose(config_dir=tmp_path, shape=SHAPE, gpu_name=GPU, triton_version="3.6.0")
    assert (answer.code, answer.status) == ("broken", 1)
    assert answer.findings[0].code == "block_k"


def test_everything_that_can_be_wrong_in_sglangs_directory(tmp_path: Path) -> None:
    up, down = write(tmp_path)
    down.write_text(json.dumps({"1": {**CONFIG.to_dict(), "BLOCK_SIZE_M": 32}, "64": CONFIG.to_dict()}))
    alone, _ = write(tmp_path, shape=SHAPE.replace(num_experts=8))
    alone.unlink()
    (tmp_path / "configs" / "triton_old").mkdir()
    (up.parent / "E=1,N=2,device_name=NVIDIA H200.json").write_text(json.dumps({"1": CONFIG.to_dict()}))
    (tmp_path / up.name).write_text(up.read_text())
    answer = diagnose(config_dir=tmp_path)
    assert {"block_m", "down_alone", "bad_directory", "name", "place"} <= set(codes(answer))
    assert answer.status == 1
    assert [f.severity for f in answer.findings] == sorted(
        (f.severity for f in answer.findings), key=["error", "warning", "note"].index
    )


def test_many_entries_with_the_same_problem_are_one_line(tmp_path: Path) -> None:
    up, _ = write(tmp_path)
    up.write_text(json.dumps({str(m): {**CONFIG.to_dict(), "BLOCK_SIZE_K": 256} for m in range(1, 20)}))
    (finding,) = (f for f in diagnose(config_dir=tmp_path).findings if f.code == "block_k")
    assert finding.message.endswith("(and 18 more of this kind)")


def test_vllm(tmp_path: Path) -> None:
    write(tmp_path, "vllm")
    answer = diagnose(config_dir=tmp_path, engine="vllm", shape=SHAPE, gpu_name="NVIDIA H200 NVL")
    assert (answer.code, answer.status) == ("tuned", 0)
    assert diagnose(config_dir=tmp_path).engine == "vllm"


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nothing to look at"):
        diagnose()
    with pytest.raises(InvalidInputError, match="not a directory"):
        diagnose(config_dir=tmp_path / "none")
    (tmp_path / "configs").mkdir()
    with pytest.raises(InvalidInputError, match="--gpu"):
        diagnose(config_dir=tmp_path, engine="sglang", shape=SHAPE)
    with pytest.raises(InvalidInputError, match="--triton"):
        diagnose(config_dir=tmp_path, engine="sglang", shape=SHAPE, gpu_name=GPU)
    assert codes(diagnose(config_dir=tmp_path, engine="sglang")) == ["empty"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.from_regex(
                r"E=[0-9a-z]{0,3},N=[0-9]{0,4},device_name=[A-Za-z_]{0,6}(,dtype=[a-z0-9_]{0,8})?", fullmatch=True
            ),
            st.binary(max_size=60),
        ),
        max_size=5,
    )
)
def test_no_directory_crashes_it(tmp_path: Path, files: list[tuple[str, bytes]]) -> None:
    place = tmp_path / "configs" / "triton_3_6_0"
    place.mkdir(parents=True, exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    for name, content in files:
        (place / f"{name}.json").write_bytes(content)
    assert diagnose(config_dir=tmp_path).status in (0, 1)
    assert diagnose(config_dir=tmp_path, shape=SHAPE, gpu_name=GPU, triton_version="3.6.0").status == 1


def test_another_kernel_that_runs_by_default_is_told(tmp_path: Path) -> None:
    shape = MoEShape(64, 4, 2048, 128)
    for gpu, codes in (("NVIDIA H200", []), ("NVIDIA GeForce RTX 5090", ["other_kernel"])):
        table = ConfigTable.of({1: LaunchConfig(16, 64, 64, 1, 4, 3), 64: LaunchConfig(16, 64, 64, 1, 4, 3)})
        export_configs("vllm", tmp_path, shape, gpu, "3.6.0", table)
        answer = diagnose(config_dir=tmp_path, engine="vllm", shape=shape, gpu_name=gpu, triton_version="3.6.0")
        assert answer.code == "tuned" and [f.code for f in answer.findings if f.severity != "note"] == codes
