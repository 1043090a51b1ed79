"""The field values of public models' config.json, against what the engines' model classes make of them.

Each file in tests/data/models holds the few fields that matter; its _source names the repository.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeopt import MoEShape
from moeopt.errors import InvalidInputError
from moeopt.models import FAMILIES, shape_from_model

DATA = Path(__file__).parents[1] / "data" / "models"

# file: (family, E, top_k, K, N, dtype, fused shared experts) in SGLang with tp 1.
SGLANG = {
    "dbrx": ("DBRX", 16, 4, 6144, 10752, "bf16", 0),
    "deepseek-v2": ("DeepSeek V2", 160, 6, 5120, 1536, "bf16", 0),
    "deepseek-v2-lite": ("DeepSeek V2", 64, 6, 2048, 1408, "bf16", 0),
    "deepseek-v3": ("DeepSeek V3, V3.2", 257, 9, 7168, 2048, "fp8_w8a8", 1),
    "deepseek-v3.2": ("DeepSeek V3, V3.2", 256, 8, 7168, 2048, "fp8_w8a8", 0),
    "ernie-4.5-21b": ("Ernie 4.5", 64, 6, 2560, 1536, "bf16", 0),
    "ernie-4.5-vl-28b": ("Ernie 4.5 VL", 64, 6, 2560, 1536, "bf16", 0),
    "gemma-4-26b": ("Gemma 4", 128, 8, 2816, 704, "bf16", 0),
    "glm-4.5": ("GLM-4.5, 4.6, 4.7", 161, 9, 5120, 1536, "bf16", 1),
    "glm-4.5-air": ("GLM-4.5, 4.6, 4.7", 129, 9, 4096, 1408, "bf16", 1),
    "glm-4.5v": ("GLM-4.5V", 129, 9, 4096, 1408, "bf16", 1),
    "glm-4.6-fp8": ("GLM-4.5, 4.6, 4.7", 161, 9, 5120, 1536, "fp8_w8a8", 1),
    "glm-4.7-flash": ("GLM-4.7-Flash", 65, 5, 2048, 1536, "bf16", 1),
    "glm-5": ("GLM-5", 257, 9, 6144, 2048, "bf16", 1),
    "granite-3.1-3b": ("Granite MoE", 40, 8, 1536, 512, "bf16", 0),
    "granite-4.0-h-small": ("Granite MoE", 72, 10, 4096, 768, "bf16", 0),
    "grok-2": ("Grok", 8, 2, 8192, 16384, "bf16", 0),
    "hunyuan-a13b": ("Hunyuan MoE", 64, 8, 4096, 3072, "bf16", 0),
    "jamba-mini": ("Jamba", 16, 2, 4096, 14336, "bf16", 0),
    "kimi-k2": ("Kimi K2", 384, 8, 7168, 2048, "fp8_w8a8", 0),
    "kimi-k2.5": ("Kimi K2.5, Kimi VL", 384, 8, 7168, 2048, "int4_w4a16", 0),
    "kimi-linear-48b": ("Kimi Linear", 256, 8, 2304, 1024, "bf16", 0),
    "kimi-vl-a3b": ("Kimi K2.5, Kimi VL", 64, 6, 2048, 1408, "bf16", 0),
    "lfm2-8b": ("LFM2 MoE", 32, 4, 2048, 1792, "bf16", 0),
    "ling-flash-2.0": ("Bailing, Ling, Ring", 256, 8, 4096, 1024, "bf16", 0),
    "llama-4-scout": ("Llama 4", 16, 1, 5120, 8192, "bf16", 0),
    "minimax-m2": ("MiniMax M2", 256, 8, 3072, 1536, "fp8_w8a8", 0),
    "minimax-m3": ("MiniMax M3", 129, 5, 6144, 3072, "bf16", 1),
    "mistral-large-3-params": ("Mistral Large 3", 128, 4, 7168, 4096, "fp8_w8a8", 0),
    "mixtral-8x7b": ("Mixtral", 8, 2, 4096, 14336, "bf16", 0),
    "nemotron-3-nano": ("Nemotron-H", 128, 6, 2688, 1856, "bf16", 0),
    "olmoe-1b-7b": ("OLMoE", 64, 8, 2048, 1024, "bf16", 0),
    "phi-3.5-moe": ("Phi-3.5-MoE", 16, 2, 4096, 6400, "bf16", 0),
    "qwen2-57b": ("Qwen2 MoE", 64, 8, 3584, 2560, "bf16", 0),
    "qwen3-235b": ("Qwen3 MoE", 128, 8, 4096, 1536, "bf16", 0),
    "qwen3-30b": ("Qwen3 MoE", 128, 8, 2048, 768, "bf16", 0),
    "qwen3-30b-awq": ("Qwen3 MoE", 128, 8, 2048, 768, "int4_w4a16", 0),
    "qwen3-30b-fp8": ("Qwen3 MoE", 128, 8, 2048, 768, "fp8_w8a8", 0),
    "qwen3-30b-gptq-int4": ("Qwen3 MoE", 128, 8, 2048, 768, "int4_w4a16", 0),
    "qwen3-next-80b": ("Qwen3-Next", 513, 11, 2048, 512, "bf16", 1),
    "qwen3-omni-30b": ("Qwen3-Omni MoE", 128, 8, 2048, 768, "bf16", 0),
    "qwen3-vl-235b": ("Qwen3-VL MoE", 128, 8, 4096, 1536, "bf16", 0),
    "qwen3.5-122b": ("Qwen3.5 MoE", 256, 8, 3072, 1024, "bf16", 0),
    "step-3.5-flash": ("Step", 288, 8, 4096, 1280, "bf16", 0),
    "step3": ("Step", 48, 3, 7168, 5120, "bf16", 0),
}
# Their formats have no Triton config file; the shape is what --dtype bf16 gives.
UNSERVED = {
    "deepseek-v4-flash": ("DeepSeek V4", 256, 6, 4096, 2048, "expert_dtype = fp4"),
    "glm-5-nvfp4": ("GLM-5", 257, 9, 6144, 2048, "quantization_config.quant_algo = NVFP4"),
    "gpt-oss-120b": ("gpt-oss", 128, 4, 2880, 2880, "quantization_config.quant_method = mxfp4"),
}


def test_every_data_file_is_tested() -> None:
    files = {p.stem for p in DATA.glob("*.json")}
    assert files == set(SGLANG) | set(UNSERVED) | {"llama-3.1-8b-dense"}


@pytest.mark.parametrize("name", sorted(SGLANG))
def test_sglang(name: str) -> None:
    family, e, top_k, k, n, dtype, shared = SGLANG[name]
    shape, derivation = shape_from_model(DATA / f"{name}.json")
    assert derivation.model.startswith(f"{family} (")
    assert (shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size) == (e, top_k, k, n)
    assert (shape.dtype, shape.shared_experts) == (dtype, shared)
    assert shape.gated == (name != "nemotron-3-nano")


@pytest.mark.parametrize("name", sorted(SGLANG))
def test_vllm_fuses_no_shared_expert(name: str) -> None:
    _, e, top_k, k, n, dtype, shared = SGLANG[name]
    shape, _ = shape_from_model(DATA / f"{name}.json", engine="vllm")
    assert (shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size) == (
        e - shared, top_k - shared, k, n,
    )  # fmt: skip
    assert (shape.dtype, shape.shared_experts) == (dtype, 0)


@pytest.mark.parametrize("name", sorted(SGLANG))
def test_each_number_names_a_key_that_is_in_the_file_with_that_value(name: str) -> None:
    data = json.loads((DATA / f"{name}.json").read_text())
    _, derivation = shape_from_model(DATA / f"{name}.json")
    by_name = {v.name: v for v in derivation.values}
    for field in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
        key, _, rest = by_name[field].source.partition(" = ")
        value = data
        for part in key.split("."):
            value = value[part]
        first = value[0] if isinstance(value, list) else value
        assert rest.split(",")[0] == str(first)


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_formats_that_triton_does_not_serve(name: str) -> None:
    family, e, top_k, k, n, said = UNSERVED[name]
    with pytest.raises(InvalidInputError) as error:
        shape_from_model(DATA / f"{name}.json")
    message = str(error.value)
    assert said in message and "does not serve" in message and "--dtype bf16" in message and "\n" not in message
    shape, derivation = shape_from_model(DATA / f"{name}.json", dtype="bf16")
    assert (shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size) == (e, top_k, k, n)
    assert shape.dtype == "bf16" and derivation.model.startswith(family)


def test_scales() -> None:
    shape = MoEShape.from_model(DATA / "deepseek-v3.json", tp=8)
    assert shape.block_shape == (128, 128) and not shape.per_channel
    shape = MoEShape.from_model(DATA / "glm-4.6-fp8.json", tp=8)
    assert shape.block_shape is None and shape.per_channel
    shape = MoEShape.from_model(DATA / "mistral-large-3-params.json")
    assert shape.block_shape is None and not shape.per_channel
    assert MoEShape.from_model(DATA / "kimi-k2.5.json").group_size == 32
    assert MoEShape.from_model(DATA / "qwen3-30b-awq.json").group_size == 128


def test_the_two_deployments() -> None:
    """GLM-5 on 8 and Qwen3.5-122B-A10B on 4 GPUs, both with SGLang."""
    glm = MoEShape.from_model(DATA / "glm-5.json", tp=8)
    assert (glm.num_experts, glm.top_k, glm.hidden_size, glm.intermediate_size) == (257, 9, 6144, 256)
    apart = MoEShape.from_model(DATA / "glm-5.json", tp=8, fuse_shared_experts=False)
    assert (apart.num_experts, apart.top_k, apart.shared_experts) == (256, 8, 0)
    qwen = MoEShape.from_model(DATA / "qwen3.5-122b.json", tp=4)
    assert (qwen.num_experts, qwen.top_k, qwen.hidden_size, qwen.intermediate_size) == (256, 8, 3072, 256)


def test_dense_model() -> None:
    with pytest.raises(InvalidInputError, match="a dense model has no MoE layer to tune") as error:
        shape_from_model(DATA / "llama-3.1-8b-dense.json")
    assert "--experts" in str(error.value)


@pytest.mark.parametrize("name", sorted(set(SGLANG) - {"mistral-large-3-params"}))
def test_without_architectures_the_model_type_tells(name: str, tmp_path: Path) -> None:
    """Checkpoints without an architectures key are a known complaint."""
    data = json.loads((DATA / f"{name}.json").read_text())
    data.pop("architectures", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    shape, _ = shape_from_model(path, engine="vllm")
    expected, _ = shape_from_model(DATA / f"{name}.json", engine="vllm")
    assert shape == expected


def test_examples_of_the_table_have_data() -> None:
    """Most families are tested on a model of theirs."""
    tested = {entry[0] for entry in (*SGLANG.values(), *UNSERVED.values())}
    untested = {f.name for f in FAMILIES} - tested
    assert untested == {
        "GLM-5 next",
        "MiniMax M1, Text-01",
        "Bailing V3",
        "Hunyuan V3",
        "Kimi K3",
        "LongCat-Flash",
        "MiMo-V2",
    }
