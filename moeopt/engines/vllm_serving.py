"""vLLM's choice of the kernel that runs the experts, as of 0.33.0."""

from __future__ import annotations

from math import gcd
from typing import Final

from moeopt.core.gpu import GpuSpec
from moeopt.engines.serving import Checkpoint, Serving

TRITON: Final = "--moe-backend triton"
# AWQ's layout is read by this loader only.
PACKED: Final = "--quantization moe_wna16"
_NO_DEEP_GEMM: Final = "VLLM_MOE_USE_DEEP_GEMM=0"
# From these versions on.
BACKEND_SINCE: Final = (0, 17)
PACKED_BY_BACKEND_SINCE: Final = (0, 27)
# Model types for which DeepGEMM is off on SM100 and SM120 (utils/deep_gemm.py).
_NO_DEEP_GEMM_TYPES: Final = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_CUTLASS_UP_TO: Final = 8
_FP8_SINCE: Final = 89
_FP8: Final = "oracle/fp8.py: select_fp8_moe_backend"


def refusal(checkpoint: Checkpoint) -> str | None:
    """Why vLLM cannot load a checkpoint's experts on a CUDA GPU, or None."""
    if checkpoint.shape.dtype == "int8_w8a8" and checkpoint.shape.block_shape:
        return "it has no block-wise int8 experts"
    return None


def refined_block(block: tuple[int, int], n: int, hidden: int) -> tuple[int, int] | None:
    """The block of scales into which vLLM cuts those of a checkpoint that do not divide N on this GPU.

    After ``refine_fp8_moe_block_shape``: the greatest common divisor, where it is at least 32.

    Args:
        block: (block_n, block_k) of the checkpoint.
        n: Intermediate size on this GPU.
        hidden: Hidden size.
    """
    size = gcd(*block, n, hidden)
    return (size, size) if size >= 32 else None


def serving(checkpoint: Checkpoint, gpu: GpuSpec | None) -> Serving:
    """The kernel that vLLM picks without options for it."""
    shape = checkpoint.shape
    sm = gpu.sm if gpu is not None else None
    family = sm // 10 if sm is not None else None
    if shape.spec.weight_only:
        return _weight_only(checkpoint)
    if shape.spec.compute == "int8":
        return Serving("all", "the Triton kernel", "oracle/int8.py: select_int8_moe_backend")
    if shape.spec.compute != "fp8":
        source = "oracle/unquantized.py: select_unquantized_moe_backend"
        if checkpoint.architecture == "GptOssForCausalLM" or family not in (10, 12):
            return Serving("all", "the Triton kernel", source)
        backend = "FlashInfer's TensorRT-LLM kernel" if family == 10 else "FlashInfer's CUTLASS kernel"
        return Serving("none", backend, source, "FlashInfer is installed with vLLM", option=TRITON)
    if sm is not None and sm < _FP8_SINCE:
        return Serving("none", "Marlin", _FP8, "Triton's fp8 experts take compute capability 8.9 and newer")
    if shape.block_shape:
        return _blocks(checkpoint, sm, family)
    if shape.per_channel:
        # Its CUTLASS kernel takes 9.0 to 10.9 (cutlass_group_gemm_supported), and none of ModelOpt's.
        if checkpoint.method == "modelopt" or family not in (9, 10):
            return Serving("all", "the Triton kernel", _FP8)
        if family == 9:
            return Serving("none", "CUTLASS", _FP8, option=TRITON)
        why, source = "larger batches leave Triton", "experts/triton_cutlass_moe.py"
        return Serving("some", "CUTLASS", source, why, _CUTLASS_UP_TO, TRITON)
    if checkpoint.static and (sm == 90 or family in (10, 12)):
        backend = "FlashInfer's TensorRT-LLM kernel" if family == 10 else "FlashInfer's CUTLASS kernel"
        return Serving("none", backend, _FP8, "activations have one static scale", option=TRITON)
    return Serving("all", "the Triton kernel", _FP8)


def triton_option(checkpoint: Checkpoint, version: tuple[int, ...] | None = None) -> str | None:
    """The option with which a release runs the Triton kernel for a checkpoint; None where it needs none or has none.

    Args:
        checkpoint: The experts.
        version: Of vLLM; None for the newest.
    """
    shape = checkpoint.shape
    if shape.spec.weight_only and checkpoint.method != "experts-int8":
        old = version is not None and version < PACKED_BY_BACKEND_SINCE
        if old and checkpoint.method in ("gptq", None):
            return None if checkpoint.act_order else PACKED
        if old and checkpoint.method != "awq":
            return None
        return _weight_only(checkpoint).option
    if version is None or version >= BACKEND_SINCE:
        return TRITON
    return "VLLM_USE_DEEP_GEMM=0" if shape.block_shape else None


def _blocks(checkpoint: Checkpoint, sm: int | None, family: int | None) -> Serving:
    if checkpoint.shape.block_shape != (128, 128):
        why = "other backends take blocks of 128 by 128 only"
        return Serving("all", "the Triton kernel", _FP8, why)
    if sm == 90 and checkpoint.shape.ep_size > 1:
        return Serving("none", "FlashInfer's CUTLASS kernel", _FP8, "experts are spread (EP)", option=TRITON)
    if sm == 90 or family not in (10, 12):
        return Serving("all", "the Triton kernel", _FP8)
    if family == 10:
        return Serving("none", "FlashInfer's TensorRT-LLM kernel", _FP8, option=TRITON)
    if set(checkpoint.model_types) & _NO_DEEP_GEMM_TYPES:
        return Serving("all", "the Triton kernel", "utils/deep_gemm.py: should_auto_disable_deep_gemm")
    return Serving("none", "DeepGEMM", _FP8, option=f"{TRITON} or {_NO_DEEP_GEMM}")


def _weight_only(checkpoint: Checkpoint) -> Serving:
    source = "oracle/int_wna16.py: select_wna16_moe_backend"
    if checkpoint.method == "experts-int8":
        return Serving("all", "the Triton kernel", "oracle/int8.py: select_int8_moe_backend")
    if checkpoint.act_order:
        return Serving("none", "Marlin", source, "Triton takes no order of activations")
    if checkpoint.method in ("gptq", "compressed-tensors", "auto-round"):
        if checkpoint.shape.dtype == "int8_w8a16" and not checkpoint.symmetric:
            return Serving("none", "Marlin", source, "Triton takes symmetric int8 weights only")
        return Serving("none", "Marlin", source, option=TRITON)
    return Serving("none", "Marlin", "moe_wna16.py: is_moe_wna16_compatible", option=PACKED)
