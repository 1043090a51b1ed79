"""quantization_config of each quantiser, as found in public checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError
from moeopt.models import Derivation, shape_from_model

BASE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}
Derive = Callable[..., tuple[MoEShape, Derivation]]


@pytest.fixture
def derive(tmp_path: Path) -> Derive:
    def derive(quantization: object, options: dict[str, Any] | None = None, **more: Any) -> tuple[MoEShape, Derivation]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**BASE, "quantization_config": quantization, **more}))
        return shape_from_model(path, **(options or {}))

    return derive


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


FP8_CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token"}

SCHEMES: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    # dtype, block_shape, per_channel, group_size
    ("fp8 per tensor", {"quant_method": "fp8", "activation_scheme": "static"}, ("fp8_w8a8", None, False, None)),
    ("fp8 blocks", {"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8_w8a8", (128, 128), False, None)),
    ("fp8 blocks null", {"quant_method": "fp8", "weight_block_size": None}, ("fp8_w8a8", None, False, None)),
    ("int8 blocks", {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]},
     ("int8_w8a8", (128, 128), False, None)),
    ("ct fp8 channel", compressed(FP8_CHANNEL, FP8_TOKEN), ("fp8_w8a8", None, True, None)),
    ("ct fp8 tensor", compressed({**FP8_CHANNEL, "strategy": "tensor"}, FP8_TOKEN), ("fp8_w8a8", None, False, None)),
    ("ct fp8 block", compressed({**FP8_CHANNEL, "strategy": "block", "block_structure": [128, 128]}, FP8_TOKEN),
     ("fp8_w8a8", (128, 128), False, None)),
    ("ct fp8 block text", compressed({**FP8_CHANNEL, "strategy": "block", "block_structure": "128x128"}, FP8_TOKEN),
     ("fp8_w8a8", (128, 128), False, None)),
    ("ct int8", compressed(INT8, INT8_TOKEN), ("int8_w8a8", None, True, None)),
    ("ct int8 weight only", compressed({**INT8, "strategy": "group", "group_size": 128}),
     ("int8_w8a16", None, False, 128)),
    ("ct int4", compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
     ("int4_w4a16", None, False, 32)),
    ("ct no method", {k: v for k, v in compressed(FP8_CHANNEL, FP8_TOKEN).items() if k != "quant_method"},
     ("fp8_w8a8", None, True, None)),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128}, ("int4_w4a16", None, False, 128)),
    ("awq old keys", {"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, ("int4_w4a16", None, False, 64)),
    ("gptq 4", {"quant_method": "gptq", "bits": 4, "group_size": 64}, ("int4_w4a16", None, False, 64)),
    ("gptq 8", {"quant_method": "gptq", "bits": 8, "group_size": 128}, ("int8_w8a16", None, False, 128)),
    ("auto-round", {"quant_method": "auto-round", "bits": 4, "group_size": 128}, ("int4_w4a16", None, False, 128)),
    ("w8a8 int8", {"quant_method": "w8a8_int8"}, ("int8_w8a8", None, True, None)),
    ("w8a8 fp8", {"quant_method": "w8a8_fp8"}, ("fp8_w8a8", None, True, None)),
    ("experts int8", {"quant_method": "experts_int8"}, ("int8_w8a16", None, True, None)),
    ("modelopt fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8_w8a8", None, False, None)),
    ("modelopt blocks", {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
     ("fp8_w8a8", (128, 128), False, None)),
    ("modelopt channel", {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
     ("fp8_w8a8", None, True, None)),
    ("modelopt mixed", {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.0.mlp.experts.gate_up": {"quant_algo": "FP8_PB_WO", "group_size": 64},
        "model.layers.0.mlp.shared_experts.up": {"quant_algo": "NVFP4", "group_size": 16}}},
     ("fp8_w8a8", (64, 64), False, None)),
    ("modelopt without a method", {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "config_groups": {"g": {
        "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        "weights": {"dynamic": False, "num_bits": 8, "type": "float"}}}}, ("fp8_w8a8", None, False, None)),
    ("auto-round blocks of fp8", {"quant_method": "auto-round", "bits": 8, "data_type": "fp8",
                                  "group_size": [128, 128]}, ("fp8_w8a8", (128, 128), False, None)),
    ("modelopt inner", {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}},
     ("fp8_w8a8", None, False, None)),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "expected"), [s[1:] for s in SCHEMES], ids=[s[0] for s in SCHEMES])
def test_scheme(derive: Derive, quantization: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """As vLLM loads it, but for what only SGLang knows."""
    engine = "sglang" if quantization.get("quant_method") == "blockwise_int8" else "vllm"
    shape, derivation = derive(quantization, {"engine": engine})
    assert (shape.dtype, shape.block_shape, shape.per_channel, shape.group_size) == expected
    (dtype,) = [v for v in derivation.values if v.name == "dtype"]
    assert dtype.value == expected[0] and dtype.source.startswith("quantization_config.")


UNSERVED: list[dict[str, Any]] = [
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "modelopt_fp4", "quant_algo": "nvfp4"},
    {"quant_method": "mxfp4"},
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"quant_method": "fp8", "weight_block_size": [1, 32]},
    {"quant_method": "w4afp8"},
    compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    {"quant_method": "fp8", "expert_dtype": "fp4"},
    {"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"},
    {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
    {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp4e2m1", "group_size": 32},
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
        },
    },
    compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, FP8_TOKEN),
]


@pytest.mark.parametrize("quantization", UNSERVED, ids=[json.dumps(q)[:50] for q in UNSERVED])
def test_unserved_formats_say_so_and_can_be_tuned_as_another(derive: Derive, quantization: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="Triton fused MoE kernel does not serve this format") as error:
        derive(quantization)
    assert "--dtype bf16 or --dtype fp8_w8a8" in str(error.value)
    shape, _ = derive(quantization, {"dtype": "fp8_w8a8", "overrides": {"block_shape": (128, 128)}})
    assert (shape.dtype, shape.block_shape) == ("fp8_w8a8", (128, 128))


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"quant_method": None}, "quant_method = None", "--dtype"),
    ({"quant_method": 3}, "quant_method = 3", "--dtype"),
    ({"quant_method": "brand-new"}, "brand-new", "--dtype"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size = 128", "--block-shape"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "[128]", "--block-shape"),
    ({"quant_method": "fp8", "weight_block_size": [128, "128"]}, "two sizes", "--block-shape"),
    ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits = 3", "--dtype"),
    ({"quant_method": "awq", "group_size": 128}, "bits = None", "--dtype"),
    ({"quant_method": "gptq", "bits": 4, "group_size": None}, "group_size = None", "--group-size"),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "group_size = -1", "--group-size"),
    ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size = 128", "--group-size"),
    (compressed({"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}), "= None", "--group-size"),
    (compressed(INT8), "one scale per row", "--group-size"),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "Triton kernels take groups only", "--group-size"),
    ({"quant_method": "auto-round", "bits": 8, "data_type": "fp", "group_size": -1}, "blocks only", "--block-shape"),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "float", "group_size": 32}, "int or fp", "--dtype"),
    ({"quant_method": "fp8", "activation_scheme": "per_moon"}, "static or dynamic", "--dtype"),
    ({"quant_method": "modelopt", "quant_algo": "INT8_SQ"}, "INT8_SQ", "--dtype"),
    (compressed({"num_bits": 8, "type": "float", "strategy": "group"}, FP8_TOKEN), "not known", "--dtype"),
    ({"quant_method": "compressed-tensors"}, "config_groups = None", "--dtype"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": None}}}, "none has weights", "--dtype"),
    ({"quant_method": "modelopt"}, "quant_algo = None", "--dtype"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers = None", "--dtype"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.experts": {"quant_algo": "FP8"},
                "model.layers.1.mlp.experts": {"quant_algo": "NVFP4"},
            },
        },
        "differ between layers",
        "--dtype",
    ),
]


@pytest.mark.parametrize(("quantization", "said", "option"), BAD)
def test_what_is_not_understood_names_the_option(
    derive: Derive, quantization: dict[str, Any], said: str, option: str
) -> None:
    with pytest.raises(InvalidInputError) as error:
        derive(quantization)
    text = str(error.value)
    assert said in text and option in text and "\n" not in text


def test_group_size_by_hand_stands_in_for_null(derive: Derive) -> None:
    shape, _ = derive({"quant_method": "gptq", "bits": 4, "group_size": None}, {"overrides": {"group_size": 64}})
    assert (shape.dtype, shape.group_size) == ("int4_w4a16", 64)


def test_groups_that_differ_need_one_that_names_the_experts(derive: Derive) -> None:
    other = {"targets": ["Linear"], "weights": INT8, "input_activations": INT8_TOKEN}
    mixed = compressed(FP8_CHANNEL, FP8_TOKEN)
    mixed["config_groups"]["group_1"] = other
    with pytest.raises(InvalidInputError, match="the groups differ"):
        derive(mixed)
    mixed["config_groups"]["group_1"] = {**other, "targets": ["re:.*mlp\\.experts\\..*"]}
    assert derive(mixed, {"engine": "vllm"})[0].dtype == "int8_w8a8"


def test_groups_that_do_not_reach_the_experts_leave_them_unquantised(derive: Derive) -> None:
    config = compressed(FP8_CHANNEL, FP8_TOKEN)
    config["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    assert derive(config)[0].dtype == "bf16"
    config["config_groups"]["group_0"]["targets"] = ["re:.*(gate|up|down)_proj$"]
    assert derive(config)[0].dtype == "fp8_w8a8"


@pytest.mark.parametrize(
    ("engine", "quantization", "said"),
    [
        ("sglang", compressed(INT8, INT8_TOKEN), "NPUs only"),
        ("sglang", {"quant_method": "experts_int8"}, "that is vLLM's"),
        ("sglang", {"quant_method": "auto-round", "bits": 8, "data_type": "fp", "group_size": [128, 128]}, "int only"),
        ("vllm", {"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}, "no block-wise int8"),
    ],
)
def test_what_one_engine_cannot_load(derive: Derive, engine: str, quantization: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot load it") as error:
        derive(quantization, {"engine": engine})
    assert said in str(error.value) and "\n" not in str(error.value)
    derive(quantization, {"engine": "vllm" if engine == "sglang" else "sglang"})


def test_experts_left_unquantised(derive: Derive) -> None:
    shape, derivation = derive({"quant_method": "fp8", "ignored_layers": ["lm_head", "re:.*mlp\\.experts\\..*"]})
    assert shape.dtype == "bf16" and any("leaves the experts unquantised" in line for line in derivation.lines)
    for spared in (["lm_head", "re:.*shared_experts.*"], ["model.layers.0.mlp.gate"], None, "x", [1, {}]):
        assert derive({"quant_method": "fp8", "modules_to_not_convert": spared})[0].dtype == "fp8_w8a8"
    shape, derivation = derive({"quant_method": "fp8", "ignored_layers": ["model.layers.92.mlp.experts.0.up_proj"]})
    assert shape.dtype == "fp8_w8a8" and any("some layers unquantised" in note for note in derivation.notes)


@pytest.mark.parametrize(
    ("spared", "dtype"),
    [
        (["re:mtp.*experts.*"], "fp8_w8a8"),
        (["mtp.layers.0.mlp.experts"], "fp8_w8a8"),
        (["model.layers.4.mlp.experts"], "fp8_w8a8"),  # one beyond the last: multi-token prediction
        (["model.layers.4"], "fp8_w8a8"),
        (["re:.*mlp.*"], "bf16"),
        (["re:.*layers\\.[0-3]\\.mlp\\.experts.*"], "bf16"),
        ([f"model.layers.{i}.mlp.experts" for i in range(4)], "bf16"),
        ([f"model.layers.{i}." for i in range(3)], "fp8_w8a8"),
    ],
)
def test_lists_that_name_other_layers_than_the_models(derive: Derive, spared: list[str], dtype: str) -> None:
    assert derive({"quant_method": "fp8", "ignored_layers": spared}, num_hidden_layers=4)[0].dtype == dtype


def test_the_quantiser_is_known_to_the_rules_of_serving(derive: Derive) -> None:
    _, derivation = derive({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": True})
    found = derivation.checkpoint
    assert (found.method, found.symmetric, found.act_order) == ("gptq", False, True)
    assert (
        derive({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True})[1].checkpoint.method == "awq"
    )
    assert derive({"quant_method": "modelopt_fp8", "quant_algo": "FP8"})[1].checkpoint.static
    assert derive(None)[1].checkpoint.method is None


@pytest.mark.parametrize(
    ("value", "dtype"), [("bfloat16", "bf16"), ("float16", "fp16"), ("torch.float16", "fp16"), (None, "bf16")]
)
def test_plain_dtypes(derive: Derive, value: str | None, dtype: str) -> None:
    assert derive(None, torch_dtype=value)[0].dtype == dtype


def test_dtype_wins_over_torch_dtype_and_float32_is_asked_about(derive: Derive) -> None:
    assert derive(None, dtype="float16")[0].dtype == "fp16"
    for bad in ("float32", 16, ["bfloat16"], {}):
        with pytest.raises(InvalidInputError, match="--dtype bf16"):
            derive(None, torch_dtype=bad)
    assert derive(None, {"dtype": "fp16"}, torch_dtype="float32")[0].dtype == "fp16"


@pytest.mark.parametrize("bad", ["fp8", 8, [1], True])
def test_quantization_config_of_another_type(derive: Derive, bad: object) -> None:
    with pytest.raises(InvalidInputError, match="quantization_config is"):
        derive(bad)


def test_empty_quantization_config_is_none(derive: Derive) -> None:
    assert derive({})[0].dtype == "bf16"


def test_hf_quant_config_beside_the_config(tmp_path: Path) -> None:
    """Older ModelOpt checkpoints say NVFP4 only there."""
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(InvalidInputError, match=r"hf_quant_config\.json.*NVFP4"):
        shape_from_model(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert shape_from_model(tmp_path)[0].dtype == "fp8_w8a8"
