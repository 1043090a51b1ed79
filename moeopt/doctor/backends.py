"""Which MoE backends read Triton config files, and what to do where one does not.

As of SGLang 0.5.23 (``MoeRunnerBackend`` and the quantisation methods) and vLLM 0.33.0 (the oracles
under ``fused_moe/oracle``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeopt.engines.names import Engine


@dataclass(frozen=True)
class Backend:
    """What is known of a backend.

    Attributes:
        name: As the engine writes it.
        reads: Whether it reads Triton config files; None where that depends on the shape.
        why: One sentence.
    """

    name: str
    reads: bool | None
    why: str


# SGLang's --moe-runner-backend values beside triton and auto, and what runs there instead.
_SGLANG: Final = {
    "flashinfer_cutlass": "FlashInfer's CUTLASS kernels",
    "flashinfer_trtllm": "FlashInfer's TensorRT-LLM kernels",
    "flashinfer_trtllm_routed": "FlashInfer's TensorRT-LLM kernels",
    "experimental_sgl_trtllm": "TensorRT-LLM kernels",
    "flashinfer_mxfp4": "FlashInfer's MXFP4 kernels",
    "flashinfer_cutedsl": "FlashInfer's CuTe DSL kernels",
    "flashinfer_megamoe": "FlashInfer's MegaMoE kernel",
    "deep_gemm": "DeepGEMM",
    "cutlass": "CUTLASS kernels",
    "marlin": "Marlin kernels",
    "experimental_sgl_marlin": "Marlin kernels",
    "lora_marlin": "Marlin kernels",
    "triton_kernel": "the triton_kernels package, which has settings of its own",
    "humming": "Humming kernels",
    "aiter": "AITER kernels",
    "hpc_ops": "HPC-Ops kernels",
    "ascend": "Ascend kernels",
    "intel_xpu": "Intel's kernels",
}
FLASHINFER: Final = frozenset(
    {
        "flashinfer_trtllm",
        "flashinfer_trtllm_routed",
        "flashinfer_mxfp4",
        "flashinfer_cutedsl",
        "flashinfer_cutlass",
        "flashinfer_megamoe",
    }
)
# Weight formats that SGLang's and vLLM's fused Triton kernel cannot multiply.
NVFP4: Final = frozenset({"modelopt_fp4", "nvfp4", "nvfp4_online", "petit_nvfp4"})
_SGLANG_AUTO: Final = {
    **dict.fromkeys(NVFP4, "NVFP4 weights have no Triton path"),
    "awq": "AWQ weights go to Marlin",
    "awq_marlin": "AWQ weights go to Marlin",
    "gptq": "GPTQ weights go to Marlin",
    "gptq_marlin": "GPTQ weights go to Marlin",
    "mxfp4": "MXFP4 weights go to FlashInfer's or the triton_kernels package's kernels",
    "mxfp8": "MXFP8 weights go to FlashInfer's kernels",
}
MARLIN_QUANTIZATION: Final = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin"})
_DEEPEP: Final = frozenset({"deepep", "deepep_v2", "mooncake", "nixl"})

_VLLM_READS: Final = frozenset({"TRITON", "BATCHED_TRITON", "EMULATION", "TRITON_MXFP8"})
_VLLM_SOMETIMES: Final = {
    "DEEPGEMM": "DeepGEMM runs, and Triton only for shapes that DeepGEMM does not take",
    "VLLM_CUTLASS": "CUTLASS runs, and Triton for the smallest batches on some GPUs",
}


def sglang_backend(name: str, quantization: str | None, a2a: str | None = None) -> Backend:
    """What SGLang's ``moe_runner_backend`` means for a quantisation.

    Args:
        name: The setting, ``auto`` included.
        quantization: SGLang's name of the quantisation, or None.
        a2a: SGLang's ``moe_a2a_backend``, or None.
    """
    if name in ("triton", "lora_triton"):
        return Backend(name, True, "the Triton kernel runs and reads config files")
    if name == "auto":
        reason = _SGLANG_AUTO.get(quantization or "")
        if reason is not None:
            return Backend(name, False, f"auto does not pick Triton here: {reason}")
        if a2a in _DEEPEP:
            return Backend(name, None, f"with the all-to-all backend {a2a} fp8 experts run in DeepGEMM")
        return Backend(name, True, "auto picks Triton for unquantised, fp8 and int8 experts")
    kernels = _SGLANG.get(name, "other kernels")
    return Backend(name, False, f"{name} runs {kernels}, and these read no Triton config file")


def vllm_backend(name: str) -> Backend:
    """What a backend that vLLM logged means."""
    key = name.strip().upper().replace(" ", "_")
    if key in _VLLM_READS:
        return Backend(name, True, f"{name} is the Triton kernel and reads config files")
    if key in _VLLM_SOMETIMES:
        return Backend(name, None, _VLLM_SOMETIMES[key])
    return Backend(name, False, f"{name} reads no Triton config file")


def triton_option(engine: Engine, quantization: str | None) -> str | None:
    """The server option that makes the Triton kernel run, or None where nothing does."""
    if (quantization or "") in NVFP4 or quantization in ("mxfp4", "mxfp8"):
        return None
    if engine == "vllm":
        return "--moe-backend triton"
    return "--quantization moe_wna16" if quantization in MARLIN_QUANTIZATION else "--moe-runner-backend triton"
