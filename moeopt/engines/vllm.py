"""vLLM, as of 0.33.0, with what older releases wrote where that differs."""

from __future__ import annotations

import re
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.engines import vllm_serving as rules
from moeopt.engines.file_names import FileNames
from moeopt.engines.layout import Layout
from moeopt.engines.log import FILE, NOT_ON_TRITON, Backend, Deployment, LogFacts, LogLine, ServerLog
from moeopt.engines.serving import ServingRules
from moeopt.engines.spec import TRITON_STAGES, TRITON_WARPS, EngineSpec, KernelFile, Server
from moeopt.errors import InvalidInputError

# Backends of the oracles under fused_moe/oracle.
_READS: Final = frozenset({"TRITON", "BATCHED_TRITON", "EMULATION", "TRITON_MXFP8"})
_SOMETIMES: Final = {
    "DEEPGEMM": "DeepGEMM runs, and Triton only for shapes that DeepGEMM does not take",
    "VLLM_CUTLASS": "CUTLASS runs, and Triton for the smallest batches on some GPUs",
}
# Not of SGLang 0.4.3, which has these words.
_FILE: Final = rf"(?![^\n]{{0,1500}}?sglang/srt/){FILE}"


def _device(gpu_name: str) -> str:
    name = re.sub(r"[\s/]+", "_", gpu_name)
    return "NVIDIA_H200" if "H200" in name.split("_") else name


def _default_config(shape: MoEShape, m: int, gpu: GpuSpec) -> LaunchConfig:
    if shape.spec.compute == "fp8" and shape.block_shape:
        block_n, block_k = shape.block_shape
        narrow = m <= 8 and block_n % 64 == 0
        return LaunchConfig(
            block_size_m=16 if m <= 64 else 64,
            block_size_n=64 if narrow else block_n,
            block_size_k=block_k,
            group_size_m=1 if m <= 16 else 32,
            num_warps=4,
            num_stages=4 if narrow and m <= 4 else 3,
        )
    if shape.group_size:
        # Its wna16 Triton kernel: tiles of N and K are chosen at the launch.
        block_m = 16 if m <= 20 else 32 if m <= 40 else 64
        block_n, block_k = (32, 64) if m == 1 else (64, 32)
        return LaunchConfig(block_m, block_n, block_k, 1, TRITON_WARPS, TRITON_STAGES)
    fp8 = shape.spec.compute == "fp8"
    return LaunchConfig(
        block_size_m=16 if m <= 32 else 32 if m <= 96 else 64 if m <= 512 else 128,
        block_size_n=64 if m <= 64 else 128,
        block_size_k=128 if fp8 or m <= 64 else 64,
        group_size_m=16 if m // shape.num_experts > 128 else 1,
        num_warps=4 if m <= 128 else 8,
        num_stages=4 if m <= 32 else 3,
    )


def _shards(tp: int, ep: int) -> int:
    """Expert parallelism spans the tensor-parallel ranks, and each keeps the full N of its experts."""
    if ep > 1 and ep % tp:
        raise InvalidInputError(
            f"--ep {ep} is not a multiple of --tp {tp}: vLLM's expert parallelism spans all tensor-parallel (and "
            f"data-parallel) ranks; give --ep {tp}"
        )
    return 1 if ep > 1 else tp


def _added_keys(shape: MoEShape) -> dict[str, int]:
    """The launch for grouped integer weights takes SPLIT_K from the file and fails without it."""
    return {"SPLIT_K": 1} if shape.spec.weight_only else {}


def _backend(facts: LogFacts, reads: bool) -> Backend | None:
    logged = facts.of("backend", "marlin")
    asked = facts.setting("moe_backend", "backend_option")
    name = logged[0].values.get("backend", "Marlin") if logged else asked
    if name is None or name == "auto":
        return None
    key = name.strip().upper().replace(" ", "_")
    if key in _READS:
        return Backend(name, True, f"{name} is the Triton kernel and reads config files")
    if key in _SOMETIMES:
        return Backend(name, None, _SOMETIMES[key])
    return Backend(name, False, f"{name} reads no Triton config file")


def _deployment(facts: LogFacts) -> Deployment:
    """Data-parallel ranks hold parts of the same experts, whole ones with expert parallelism."""
    tp = facts.number("tensor_parallel_size")
    ranks = tp * facts.number("data_parallel_size")
    spread = facts.is_on("enable_expert_parallel") and ranks > 1
    return Deployment(
        tp=tp if spread else ranks,
        ep=ranks if spread else 1,
        start_tp=tp,
        draft=facts.setting("draft"),
    )


def _triton_option(facts: LogFacts) -> str | None:
    """The option for what the log says of the weights; versions before 0.17 have no --moe-backend."""
    kinds = {event.values.get("kind") for event in facts.of("backend")}
    quantization = (facts.setting("quantization") or "").replace("_marlin", "")
    if "NvFp4" in kinds or quantization in NOT_ON_TRITON:
        return None
    old = facts.version is not None and facts.version < rules.PACKED_BY_BACKEND_SINCE
    if quantization == "awq" or (old and quantization == "gptq"):
        return rules.PACKED
    if old and (quantization == "compressed-tensors" and ("WNA16" in kinds or facts.of("marlin"))):
        return None
    if facts.version is not None and facts.version < rules.BACKEND_SINCE:
        return "VLLM_USE_DEEP_GEMM=0" if quantization == "fp8" else None
    return rules.TRITON


_LOG: Final = ServerLog(
    lines=(
        LogLine("tuned", "for MoE layer", rf"Using configuration from (?P<path>{_FILE}) for MoE layer"),
        LogLine(
            "default",
            "Using default MoE config",
            rf"Using default MoE config\.(?:[^\n]{{0,200}}?Config file not found at \[?'?(?P<asked>{_FILE}))?",
        ),
        LogLine(
            "backend",
            "MoE",
            r"Using '?(?P<backend>[\w ]{2,60}?)'? (?P<kind>Unquantized|Fp8|NvFp4|WNA16|Mxfp4|MxFp8|W4A8 Int8|W4A8|Int8"
            r"|Humming) MoE (?:LoRA )?backend",
        ),
        # 0.8 to 0.17: "kernels for Fp8MoEMethod", "backend for FP8 MoE".
        LogLine(
            "backend",
            "MoE",
            r"Using (?P<backend>[\w ]{2,60}?) (?:kernels?|backend) for (?P<kind>[A-Za-z0-9]{2,40}?)(?:Fused)? ?MoE",
        ),
        # Marlin's method of versions before WNA16 had backends (0.27).
        LogLine("marlin", "Marlin", r"Using CompressedTensorsWNA16MarlinMoEMethod"),
        LogLine("marlin", "_marlin kernel", r"Using (?P<kind>awq|gptq)_marlin kernel"),
        LogLine(
            "refined",
            "block scales refined",
            r"block scales refined from \[(?P<checkpoint>[\d, ]+)\] to "
            r"\[(?P<block>[\d, ]+)\]",
        ),
        LogLine(
            "padded",
            "complete checkpoint blocks",
            r"TP loading uses complete checkpoint blocks: local allocation "
            r"(?P<n>\d+)",
        ),
        LogLine("version", "LLM engine (v", r"LLM engine \(v(?P<version>[^)\s]{1,60})\)"),
    ),
    starts=("non-default args: ",),
    lists=("non-default args", "LLM engine (v"),
    opening="the engine's config",
    settings=(
        "model",
        "tensor_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "quantization",
        "moe_backend",
        "log_level",
    ),
    anywhere=(
        LogLine("backend_option", "--moe-backend", r"--moe-backend[= ](?P<value>[a-z][a-z0-9_]*)"),
        # A mapping among the arguments, or the engine's own object; it has no model where nothing is drafted by one.
        LogLine(
            "draft",
            "speculative_config",
            r"speculative_config['\"]?\s*[:=]\s*(?:\{|SpeculativeConfig\()[^}\n]{0,500}?"
            r"\bmodel['\"]?\s*[:=]\s*['\"](?P<value>[^'\"\n]{1,1000})['\"]",
        ),
    ),
    own=("moe_backend", "tensor_parallel_size"),
    shown=("moe_backend", "backend_option", "quantization"),
    backend=_backend,
    deployment=_deployment,
    triton_option=_triton_option,
    dense="DeepGEMM and CUTLASS come before it; its files are those of the package alone (quantization/utils/configs), "
    "which VLLM_TUNED_CONFIG_FOLDER does not change.",
    # An NVFP4 model may have unquantised layers for multi-token prediction.
    mixes=True,
    kinds={
        "unquantized": frozenset({None}),
        "fp8": frozenset({"fp8_w8a8"}),
        "wna16": frozenset({"int4_w4a16", "int8_w8a16"}),
        "int8": frozenset({None, "int8_w8a16"}),
    },
)

VLLM: Final = EngineSpec(
    name="vllm",
    title="vLLM",
    kernel=KernelFile(
        variable="MOEOPT_VLLM_KERNEL",
        versions="0.11 to 0.33",
        paths=("model_executor/layers/fused_moe/fused_moe.py",),
        adapter="moeopt.kernels.vllm:VllmKernel",
        column_scales=True,
    ),
    names=FileNames(
        device=_device,
        words={"int8_w8a8": None},
        other_words=frozenset({"fp8_w8a16", "float32"}),
    ),
    layout=Layout(),
    variable="VLLM_TUNED_CONFIG_FOLDER",
    replaces_bundled=False,
    bundled=("model_executor/layers/fused_moe/configs",),
    default_config=_default_config,
    shards=_shards,
    server=Server(
        command="vllm serve {model}",
        tp_option="--tensor-parallel-size",
        kept=("data_parallel_size", "enable_expert_parallel", "moe_backend"),
    ),
    serving=ServingRules(rules.serving, rules.triton_option, False, rules.refusal, rules.refined_block),
    log=_LOG,
    more_keys=frozenset({"num_ctas", "SPLIT_K"}),
    fixed_keys={"SPLIT_K": 1},
    added_keys=_added_keys,
    clamps_block_k=True,
    notes_triton_version=True,
)
