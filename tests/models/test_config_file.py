"""Files that are not a model's config.json, and text from anywhere: one clear line, never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeopt.errors import InvalidInputError, MoeoptError
from moeopt.models import config_file, shape_from_model
from moeopt.models.families import EXPERT_KEYS, FAMILIES, GENERIC

DATA = Path(__file__).parents[1] / "data" / "models"


def message(path: Path | str) -> str:
    with pytest.raises(InvalidInputError) as error:
        shape_from_model(path)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    return text


def test_directory_and_file_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((DATA / "glm-5.json").read_bytes())
    assert shape_from_model(tmp_path)[0] == shape_from_model(tmp_path / "config.json")[0]


def test_missing(tmp_path: Path) -> None:
    assert "nothing is downloaded" in message(tmp_path / "nowhere")
    assert "nothing is downloaded" in message("zai-org/GLM-5")
    assert "holds no config.json" in message(tmp_path)
    for bad in ("a\0b", "x" * 5000):
        with pytest.raises(InvalidInputError):
            shape_from_model(bad)


def test_params_json_is_read_where_there_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_bytes((DATA / "mistral-large-3-params.json").read_bytes())
    assert shape_from_model(tmp_path)[0].num_experts == 128


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"num_experts": 12', "not JSON"),
        (b"\xff\xfe{}", "not text in UTF-8"),
        (b"\x1f\x8b\x08\x00", "not text in UTF-8"),
        (b"[1, 2]", "holds a list"),
        (b"3", "holds a int"),
        (b"null", "holds null"),
        (b'"text"', "holds a string"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"num_experts": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_broken_content(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert said in message(path) and str(path) in message(path)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, config_file.MAX_BYTES + 1)
    assert "over the 67,108,864" in message(path)


def test_no_file_at_all(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a file" in message(tmp_path / "config.json")
    assert "holds no config.json" in message(tmp_path)


def test_unreadable() -> None:
    assert "cannot be read (" in message("/proc/self/mem")


def test_names_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    data = json.loads((DATA / "qwen3-30b.json").read_text())
    data["architectures"] = ["Brand\nNew\x1b[31m" + "x" * 500]
    data["model_type"] = "brand\nnew"
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "ten\nsor"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    _, derivation = shape_from_model(path)
    assert all("\n" not in line and "\x1b" not in line and len(line) < 400 for line in derivation.lines)
    path.write_text(json.dumps({**data, "quantization_config": {"config_groups": {"a\nb": group}}}))
    message(path)


@pytest.mark.parametrize("wrapper", ["text_config", "thinker_config", "language_config", "llm_config"])
def test_nested_parts(tmp_path: Path, wrapper: str) -> None:
    inner = json.loads((DATA / "qwen3-30b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"architectures": ["WrapperModel"], wrapper: inner, "vision_config": {"num_experts": 3}})
    )
    shape, derivation = shape_from_model(path)
    assert (shape.num_experts, shape.intermediate_size) == (128, 768)
    assert any(f"{wrapper}.moe_intermediate_size = 768" in line for line in derivation.lines)


def test_the_text_part_goes_before_keys_of_the_root(tmp_path: Path) -> None:
    inner = json.loads((DATA / "qwen3-30b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**inner, "num_experts": 4, "text_config": inner}))
    assert shape_from_model(path)[0].num_experts == 128


def test_parts_within_parts_without_end(tmp_path: Path) -> None:
    data: dict[str, Any] = {"num_experts": 8}
    for _ in range(50):
        data = {"text_config": data}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    assert "no key counts experts" in message(path)


# Random JSON whose keys are often those that are looked for.
KEYS = sorted(
    {part for key in EXPERT_KEYS for part in key.split(".")}
    | {k for f in (*FAMILIES, GENERIC) for k in (*f.top_k, *f.intermediate, *f.hidden, *f.shared) if "." not in k}
    | {"architectures", "model_type", "text_config", "quantization_config", "quant_method", "config_groups", "weights"}
    | {"weight_block_size", "group_size", "bits", "num_bits", "type", "strategy", "targets", "ignore", "torch_dtype"}
    | {
        "expert_dtype",
        "moe",
        "dim",
        "intermediate_size",
        "shared_expert_intermediate_size",
        "quant_algo",
        "quantization",
    }
)
WORDS = [a for f in FAMILIES for a in (*f.architectures, *f.model_types)] + [
    "fp8", "compressed-tensors", "awq", "gptq", "modelopt", "FP8", "NVFP4", "int", "float", "channel", "block", "group",
    "bfloat16", "float16", "re:.*experts.*", "model.layers.0.mlp.experts", "128x128", "Linear", "", "\n\x00\ud7ff",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.sampled_from([128, 768, 2048, 10**30]), st.floats(),
    st.sampled_from(WORDS), st.text(max_size=8),
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=5)), inner, max_size=9),
    ),
    max_leaves=40,
)


def check_total(text: bytes, **options: Any) -> None:
    """Whatever the file holds, there is a shape or a MoeoptError of one line."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_bytes(text)
        try:
            shape, derivation = shape_from_model(path, **options)
        except MoeoptError as error:
            assert "\n" not in str(error) and str(error)
        else:
            assert shape.num_experts >= 1 and all("\n" not in line for line in derivation.lines)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "engine": st.sampled_from(["sglang", "vllm"]),
        "tp": st.sampled_from([1, 2, 3, 8]),
        "ep": st.sampled_from([1, 2, 8]),
        "dtype": st.sampled_from(["bf16", "fp8_w8a8", "int4_w4a16"]),
        "fuse_shared_experts": st.booleans(),
        "overrides": st.dictionaries(
            st.sampled_from(["num_experts", "top_k", "hidden_size", "intermediate_size", "group_size"]),
            st.integers(0, 300), max_size=5,
        ),
    },
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(JSON, OPTIONS)
def test_random_json(value: object, options: dict[str, Any]) -> None:
    check_total(json.dumps(value).encode("utf-8", "surrogatepass"), **options)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(DATA.glob("*.json"))),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2),
    OPTIONS,
)
def test_real_configs_with_some_values_replaced(
    path: Path, replaced: dict[str, Any], nested: dict[str, Any], options: dict[str, Any]
) -> None:
    data = {**json.loads(path.read_text()), **replaced}
    for part in ("text_config", "quantization_config"):
        if isinstance(data.get(part), dict):
            data[part] = {**data[part], **nested}
    check_total(json.dumps(data).encode("utf-8", "surrogatepass"), **options)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    check_total(data)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DATA.glob("*.json"))), st.integers(0, 3000))
def test_truncated_files(path: Path, length: int) -> None:
    whole = path.read_bytes().rstrip()
    with contextlib.suppress(IndexError):
        check_total(whole[: min(length, len(whole) - 1)])
