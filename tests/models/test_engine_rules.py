"""Tensor and expert parallelism, shared experts, packed int4, and what is given by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeopt.errors import InvalidInputError, MoeoptError
from moeopt.models import shape_from_model

DATA = Path(__file__).parents[1] / "data" / "models"
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}
UNKNOWN = {**QWEN3, "architectures": ["BrandNewMoeForCausalLM"], "model_type": "brand_new"}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(data: dict[str, Any]) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))
        return path

    return write


def message(path: Path, **options: Any) -> str:
    with pytest.raises(InvalidInputError) as error:
        shape_from_model(path, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("tp", "ep", "e", "n"),
    [(1, 1, 128, 1536), (8, 1, 128, 192), (8, 8, 16, 1536), (8, 2, 64, 384), (8, 4, 32, 768), (3, 1, 128, 512)],
)
def test_sglang_splits_experts_by_ep_and_n_by_tp_over_ep(tp: int, ep: int, e: int, n: int) -> None:
    shape, derivation = shape_from_model(DATA / "qwen3-235b.json", engine="sglang", tp=tp, ep=ep)
    assert (shape.num_experts, shape.intermediate_size, shape.ep_size) == (e, n, ep)
    assert derivation.file == f"E={e},N={n}"


@pytest.mark.parametrize(
    ("tp", "ep", "e", "n"), [(1, 1, 128, 1536), (8, 1, 128, 192), (8, 8, 16, 1536), (8, 16, 8, 1536)]
)
def test_vllm_keeps_the_full_n_under_expert_parallelism(tp: int, ep: int, e: int, n: int) -> None:
    shape, derivation = shape_from_model(DATA / "qwen3-235b.json", engine="vllm", tp=tp, ep=ep)
    assert (shape.num_experts, shape.intermediate_size, shape.ep_size) == (e, n, ep)
    assert derivation.file == f"E={e},N={n}"


def test_ep_that_does_not_fit_tp() -> None:
    assert "SGLang takes --ep 1, 2, 4, 8" in message(DATA / "qwen3-235b.json", tp=8, ep=3)
    assert "give --ep 8" in message(DATA / "qwen3-235b.json", engine="vllm", tp=8, ep=4)


def test_experts_that_do_not_divide() -> None:
    text = message(DATA / "step3.json", tp=32, ep=32)
    assert "moe_num_experts = 48" in text and "1, 2, 3, 4, 6, 8, 12, 16, 24, 48" in text


def test_tp_that_does_not_divide_names_the_sizes_that_do() -> None:
    text = message(DATA / "qwen3-30b.json", tp=5)
    assert "moe_intermediate_size = 768" in text and "--tp = 5" in text
    assert "sizes that do: 1, 2, 3, 4, 6, 8, 12" in text


def test_tp_that_cuts_blocks_of_scales() -> None:
    """768 / 4 = 192 columns are one and a half blocks: SGLang refuses to load that, vLLM cuts the blocks."""
    text = message(DATA / "qwen3-30b-fp8.json", tp=4)
    assert "multiples of block_shape [128, 128]" in text and "sizes that do: 1, 2, 3, 6)" in text
    assert "SGLang cannot load it either" in text
    for engine in ("sglang", "vllm"):
        assert shape_from_model(DATA / "qwen3-30b-fp8.json", engine=engine, tp=2)[0].intermediate_size == 384
    shape, derivation = shape_from_model(DATA / "qwen3-30b-fp8.json", engine="vllm", tp=4)
    assert (shape.intermediate_size, shape.block_shape) == (192, (64, 64))
    assert any("refines to divide N" in line for line in derivation.lines)


@pytest.mark.parametrize(("tp", "n", "block"), [(8, 192, (64, 64)), (16, 96, (32, 32)), (4, 384, (128, 128))])
def test_blocks_that_vllm_refines(write: Callable[..., Path], tp: int, n: int, block: tuple[int, int]) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = write({**QWEN3, "moe_intermediate_size": 1536, "hidden_size": 3072, "quantization_config": fp8})
    shape, derivation = shape_from_model(path, engine="vllm", tp=tp)
    assert (shape.intermediate_size, shape.block_shape) == (n, block)
    assert derivation.file == f"E=128,N={n}"
    narrow = write({**QWEN3, "moe_intermediate_size": 1536 // 24, "quantization_config": fp8})
    assert "vLLM cannot load it either" in message(narrow, engine="vllm", tp=4)


@pytest.mark.parametrize(("method", "experts"), [("awq", 257), ("gptq", 257), ("compressed-tensors", 256)])
def test_deepseeks_shared_expert_is_fused_where_moe_wna16_loads_it(
    write: Callable[..., Path], method: str, experts: int
) -> None:
    data = json.loads((DATA / "deepseek-v3.json").read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    packed = {"quant_method": method, "bits": 4, "group_size": 64, "config_groups": {"g": {"weights": weights}}}
    shape, _ = shape_from_model(write({**data, "quantization_config": packed}), tp=8)
    assert (shape.num_experts, shape.dtype) == (experts, "int4_w4a16")


def test_experts_that_are_narrower_than_the_model(write: Callable[..., Path]) -> None:
    text = {
        "model_type": "kimi_linear", "hidden_size": 7168, "routed_expert_hidden_size": 3584, "num_experts": 896,
        "num_experts_per_token": 16, "moe_intermediate_size": 3072, "dtype": "bfloat16",
    }  # fmt: skip
    path = write({"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text})
    assert shape_from_model(path)[0].hidden_size == 3584
    del text["routed_expert_hidden_size"]
    path = write({"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text})
    assert shape_from_model(path)[0].hidden_size == 7168


def test_experts_without_weights_do_not_count(write: Callable[..., Path]) -> None:
    longcat = {
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "n_routed_experts": 512,
        "zero_expert_num": 256, "moe_topk": 12, "expert_ffn_hidden_size": 2048, "hidden_size": 6144,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    shape, derivation = shape_from_model(write(longcat), tp=8)
    assert (shape.num_experts, shape.top_k, shape.intermediate_size) == (512, 12, 256)
    assert "not in the table" not in derivation.model


def test_blocks_need_not_be_square(write: Callable[..., Path]) -> None:
    """Both sizes of the block count once an expert is cut; uncut, only the first (both engines check so)."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [64, 128]}
    path = write({**QWEN3, "moe_intermediate_size": 192, "quantization_config": fp8})
    assert shape_from_model(path)[0].intermediate_size == 192
    assert "(sizes that do: 1)" in message(path, tp=3)
    assert "no size does" in message(write({**QWEN3, "moe_intermediate_size": 96, "quantization_config": fp8}))


def test_packed_int4_in_the_file_name() -> None:
    """SGLang counts bytes, vLLM elements; the shape has elements in both."""
    shape, derivation = shape_from_model(DATA / "kimi-k2.5.json", engine="sglang", tp=8)
    assert (shape.intermediate_size, derivation.file) == (256, "E=384,N=128")
    shape, derivation = shape_from_model(DATA / "kimi-k2.5.json", engine="vllm", tp=8)
    assert (shape.intermediate_size, derivation.file) == (256, "E=384,N=256")


def test_group_size_is_halved_until_it_divides() -> None:
    shape, derivation = shape_from_model(DATA / "qwen3-30b-gptq-int4.json", tp=4)
    assert (shape.intermediate_size, shape.group_size) == (192, 64)
    assert any("which the engine halves" in line for line in derivation.lines)
    assert shape_from_model(DATA / "qwen3-30b-gptq-int4.json", tp=8)[0].group_size == 32
    assert "halved, down to 32" in message(DATA / "qwen3-30b-gptq-int4.json", tp=16)
    assert shape_from_model(DATA / "qwen3-30b-gptq-int4.json", tp=16, overrides={"group_size": 16})[0].group_size == 16


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5", "glm-4.5v", "glm-4.7-flash", "glm-5", "minimax-m3"])
def test_no_fusion_with_expert_parallelism(name: str) -> None:
    one, _ = shape_from_model(DATA / f"{name}.json", tp=4)
    two, derivation = shape_from_model(DATA / f"{name}.json", tp=4, ep=2)
    assert one.shared_experts == 1 and two.shared_experts == 0
    assert two.num_experts == (one.num_experts - 1) // 2 and two.top_k == one.top_k - 1
    assert any("not fused with expert parallelism" in line for line in derivation.lines)


def test_qwen3_next_fuses_with_expert_parallelism_too() -> None:
    shape, _ = shape_from_model(DATA / "qwen3-next-80b.json", tp=4, ep=4)
    assert (shape.num_experts, shape.top_k, shape.shared_experts) == (129, 11, 1)


def test_qwen3_next_does_not_fuse_a_shared_expert_of_another_size(write: Callable[..., Path]) -> None:
    data = json.loads((DATA / "qwen3-next-80b.json").read_text())
    shape, derivation = shape_from_model(write({**data, "shared_expert_intermediate_size": 1024}))
    assert (shape.num_experts, shape.top_k) == (512, 10)
    assert any("has a routed expert's size" in line for line in derivation.lines)


def test_fusion_asked_for_and_refused() -> None:
    shape, _ = shape_from_model(DATA / "deepseek-v3.2.json", fuse_shared_experts=True)
    assert (shape.num_experts, shape.top_k, shape.shared_experts) == (257, 9, 1)
    shape, _ = shape_from_model(DATA / "deepseek-v3.json", fuse_shared_experts=False)
    assert (shape.num_experts, shape.top_k, shape.shared_experts) == (256, 8, 0)
    assert "names no shared expert" in message(DATA / "qwen3-30b.json", fuse_shared_experts=True)
    assert "vLLM fuses no shared expert" in message(DATA / "deepseek-v3.json", engine="vllm", fuse_shared_experts=True)


def test_unknown_family_is_probed_and_said(write: Callable[..., Path]) -> None:
    shape, derivation = shape_from_model(write(UNKNOWN), tp=4)
    assert (shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size) == (128, 8, 2048, 192)
    text = "\n".join(derivation.lines)
    assert "BrandNewMoeForCausalLM is not in the table" in text and "moe_intermediate_size = 768" in text


def test_unknown_family_with_keys_that_contradict_each_other(write: Callable[..., Path]) -> None:
    path = write({**UNKNOWN, "n_routed_experts": 64})
    text = message(path)
    assert "ambiguous" in text and "n_routed_experts = 64" in text and "num_experts = 128" in text
    assert "--experts" in text
    shape, _ = shape_from_model(path, overrides={"num_experts": 64})
    assert shape.num_experts == 64


def test_unknown_family_takes_the_dense_size_only_if_no_layer_is_dense(write: Callable[..., Path]) -> None:
    sized = {**UNKNOWN, "moe_intermediate_size": ..., "intermediate_size": 1536}
    shape, derivation = shape_from_model(write(sized))
    assert shape.intermediate_size == 1536 and any("taken as the size of one expert" in n for n in derivation.notes)
    assert "--intermediate" in message(write({**sized, "first_k_dense_replace": 1}))


@pytest.mark.parametrize(
    ("key", "option"),
    [("num_experts_per_tok", "--top-k"), ("hidden_size", "--hidden"), ("moe_intermediate_size", "--intermediate")],
)
@pytest.mark.parametrize("bad", [..., None, "8", 1.5, -4, True, 0, [], [1, 2], {}, 10**12])
@pytest.mark.parametrize("base", [QWEN3, UNKNOWN])
def test_a_number_that_is_missing_or_bad_names_the_option(
    write: Callable[..., Path], base: dict[str, Any], key: str, option: str, bad: object
) -> None:
    path = write({**base, key: bad})
    text = message(path)
    assert option in text and str(path) in text
    field = {"--top-k": "top_k", "--hidden": "hidden_size", "--intermediate": "intermediate_size"}[option]
    shape, derivation = shape_from_model(path, overrides={field: 96})
    assert getattr(shape, field) == 96
    assert any(f"given by hand ({option})" in line for line in derivation.lines)


@pytest.mark.parametrize("bad", ["128", 1.5, True, [64, 128], {}])
def test_bad_expert_counts(write: Callable[..., Path], bad: object) -> None:
    assert "--experts" in message(write({**QWEN3, "num_experts": bad}))


@pytest.mark.parametrize("count", [0, 1])
def test_one_expert_is_a_dense_model(write: Callable[..., Path], count: int) -> None:
    assert "dense model" in message(write({**QWEN3, "num_experts": count}))


def test_all_by_hand_on_a_config_that_says_nothing(write: Callable[..., Path]) -> None:
    given = {"num_experts": 16, "top_k": 2, "hidden_size": 1024, "intermediate_size": 512}
    shape, derivation = shape_from_model(write({}), overrides=given)
    assert {k: getattr(shape, k) for k in given} == given
    assert sum("given by hand" in line for line in derivation.lines) == 4


def test_per_layer_lists(write: Callable[..., Path]) -> None:
    path = write({**QWEN3, "moe_intermediate_size": [768] * 48})
    assert shape_from_model(path)[0].intermediate_size == 768
    text = message(write({**QWEN3, "moe_intermediate_size": [768, 1024, 768, 512, 256, 128]}))
    assert "differs between layers (768, 1024, 512, 256, ...)" in text


@pytest.mark.parametrize("field", ["num_experts", "top_k", "hidden_size", "intermediate_size", "group_size"])
@pytest.mark.parametrize("bad", [0, -1, True, "8", 1.0])
def test_bad_values_by_hand(field: str, bad: object) -> None:
    with pytest.raises(InvalidInputError, match="give a whole number of at least 1"):
        shape_from_model(DATA / "qwen3-30b-awq.json", overrides={field: bad})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 0}, "--tp is 0"),
        ({"tp": True}, "--tp is True"),
        ({"ep": -1}, "--ep is -1"),
        ({"engine": "trt"}, "engine 'trt' is unknown"),
        ({"dtype": "fp4"}, "--dtype 'fp4' is unknown"),
        ({"overrides": {"block_shape": (128,)}}, "--block-shape is (128,)"),
        ({"overrides": {"block_shape": (128, 0)}}, "--block-shape is (128, 0)"),
        ({"overrides": {"color": 1}}, "override 'color' is unknown"),
        ({"overrides": {"top_k": 500}}, "top_k 500 is greater"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    assert said in message(DATA / "qwen3-30b.json", **options)


def test_scales_by_hand_replace_the_configs(write: Callable[..., Path]) -> None:
    path = DATA / "qwen3-30b-fp8.json"
    shape, _ = shape_from_model(path, overrides={"per_channel": True})
    assert (shape.block_shape, shape.per_channel) == (None, True)
    shape, _ = shape_from_model(path, tp=4, overrides={"block_shape": (64, 64)})
    assert (shape.block_shape, shape.intermediate_size) == ((64, 64), 192)
    shape, _ = shape_from_model(DATA / "qwen3-30b.json", dtype="fp8_w8a8", overrides={"block_shape": (128, 128)})
    assert (shape.dtype, shape.block_shape) == ("fp8_w8a8", (128, 128))


def test_a_dtype_by_hand_keeps_the_scales_only_of_the_same_dtype() -> None:
    shape, _ = shape_from_model(DATA / "qwen3-30b-fp8.json", dtype="fp8_w8a8")
    assert shape.block_shape == (128, 128)
    shape, derivation = shape_from_model(DATA / "qwen3-30b-fp8.json", dtype="bf16", tp=4)
    assert shape.block_shape is None and shape.intermediate_size == 192
    assert any("given by hand, where quantization_config.weight_block_size" in line for line in derivation.lines)
    with pytest.raises(MoeoptError, match="group_size"):
        shape_from_model(DATA / "qwen3-30b.json", dtype="int4_w4a16")
