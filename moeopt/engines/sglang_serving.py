"""SGLang's choice of the kernel that runs the experts, as of 0.5.23."""

from __future__ import annotations

from typing import Final

from moeopt.core.gpu import GpuSpec
from moeopt.engines.serving import Checkpoint, Serving

TRITON: Final = "--moe-runner-backend triton"
# AWQ and GPTQ weights go to Marlin, which reads no file, unless they are loaded this way.
PACKED: Final = "--quantization moe_wna16"
# From these versions on.
RUNNER_BACKEND_SINCE: Final = (0, 5, 1)
PACKED_BY_RUNNER_SINCE: Final = (0, 5, 11)
# Groups of int4 weights that its Triton path for compressed-tensors takes.
_GROUPS: Final = (32, 128)
_NEMOTRON: Final = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")
# Models whose experts run in FlashInfer's TensorRT-LLM kernels on SM100 where nothing else is asked for, and the
# quantisers for which they do; None is for unquantised weights (arg_groups/model_overrides, arg_groups/overrides.py).
_DEEPSEEK: Final = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MistralLarge3ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Glm5NextForConditionalGeneration",
)
_QWEN: Final = (
    "Qwen3MoeForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
_TRTLLM: Final[dict[str, frozenset[str | None]]] = {
    **dict.fromkeys(_DEEPSEEK, frozenset({"fp8", "modelopt", None})),
    **dict.fromkeys(_QWEN, frozenset({"fp8", None})),
    "Glm4MoeForCausalLM": frozenset({None}),
    **dict.fromkeys(("Llama4ForConditionalGeneration", "Llama4ForCausalLM"), frozenset({"fp8", "modelopt"})),
}


# Where create_moe_runner is, by quantiser and what the kernel multiplies; None stands for every other quantiser.
_FILES: Final[dict[tuple[str | None, str], str]] = {
    (None, "bf16"): "unquant.py",
    (None, "fp16"): "unquant.py",
    (None, "fp8"): "fp8.py",
    ("compressed-tensors", "fp8"): "compressed_tensors_w8a8_fp8_moe.py",
    ("modelopt", "fp8"): "modelopt_quant.py",
    ("w8a8-fp8", "fp8"): "w8a8_fp8.py",
    (None, "int8"): "w8a8_int8.py",
    ("blockwise-int8", "int8"): "blockwise_int8.py",
}


def refusal(checkpoint: Checkpoint) -> str | None:
    """Why SGLang cannot load a checkpoint's experts on a CUDA GPU, or None."""
    if checkpoint.method == "compressed-tensors" and checkpoint.shape.dtype == "int8_w8a8":
        return "its int8 w8a8 experts of compressed-tensors run on NPUs only (get_moe_scheme raises)"
    if checkpoint.method == "experts-int8":
        return "it knows no experts_int8: that is vLLM's"
    if checkpoint.method == "auto-round" and checkpoint.shape.spec.compute == "fp8":
        return "its AutoRound takes data_type int only (auto_round.py)"
    return None


def serving(checkpoint: Checkpoint, gpu: GpuSpec | None) -> Serving:
    """The kernel that SGLang picks without options for it."""
    if checkpoint.shape.spec.weight_only:
        return _weight_only(checkpoint, gpu)
    sm = gpu.sm if gpu is not None else None
    if checkpoint.architecture == "GptOssForCausalLM" and checkpoint.method is None:
        why = "gpt-oss in 16 bits goes there, but on Blackwell with a driver of 595 or newer"
        return Serving("none", "triton_kernels", "model_overrides/gpt_oss.py", why, option=TRITON)
    if checkpoint.architecture in _NEMOTRON and checkpoint.method in (None, "modelopt"):
        backend = "FlashInfer's TensorRT-LLM kernel" if sm in (100, 103) else "FlashInfer's CUTLASS kernel"
        return Serving("none", backend, "model_overrides/nemotron_h.py", option=TRITON)
    if sm in (100, 103) and checkpoint.method in _TRTLLM.get(checkpoint.architecture or "", ()):
        why = "this model goes there on SM100"
        return Serving("none", "FlashInfer's TensorRT-LLM kernel", "arg_groups/model_overrides", why, option=TRITON)
    file = _FILES.get((checkpoint.method, checkpoint.shape.spec.compute), _FILES[None, checkpoint.shape.spec.compute])
    return Serving("all", "the Triton kernel", f"{file}: create_moe_runner")


def triton_option(checkpoint: Checkpoint, version: tuple[int, ...] | None = None) -> str | None:
    """The option with which a release runs the Triton kernel for a checkpoint; None where it needs none or has none.

    Args:
        checkpoint: The experts.
        version: Of SGLang; None for the newest.
    """
    if checkpoint.shape.spec.weight_only:
        if version is not None and version < PACKED_BY_RUNNER_SINCE and checkpoint.method == "compressed-tensors":
            return None
        return _weight_only(checkpoint, None).option
    return None if version is not None and version < RUNNER_BACKEND_SINCE else TRITON


def _weight_only(checkpoint: Checkpoint, gpu: GpuSpec | None) -> Serving:
    shape = checkpoint.shape
    if checkpoint.method == "compressed-tensors":
        source = "compressed_tensors.py: get_moe_scheme"
        takes = shape.dtype == "int4_w4a16" and shape.group_size in _GROUPS
        if not takes or not checkpoint.symmetric or checkpoint.act_order:
            why = "Triton takes symmetric int4 in groups of 32 or 128 without an order of activations only"
            return Serving("none", "Marlin", source, why)
        if gpu is not None and gpu.sm in (100, 103):
            if checkpoint.architecture in _DEEPSEEK and shape.group_size == 32:
                why = "this model goes there on SM100"
                return Serving(
                    "none", "FlashInfer's TensorRT-LLM kernel", "arg_groups/overrides.py", why, option=TRITON
                )
            return Serving("all", "the Triton kernel", source)
        return Serving("none", "Marlin", source, option=TRITON)
    if checkpoint.method == "auto-round":
        return Serving("none", "Marlin", "auto_round.py: apply_gptq_quant_layer", "it takes these weights")
    source = "moe_wna16.py: is_moe_wna16_compatible"
    if checkpoint.act_order:
        return Serving("none", "Marlin", source, "moe_wna16 takes no order of activations")
    if checkpoint.method == "awq" and shape.dtype != "int4_w4a16":
        return Serving("none", "Marlin", source, "moe_wna16 takes 4-bit AWQ only")
    return Serving("none", "Marlin", source, option=PACKED)
