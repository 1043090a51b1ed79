"""vLLM, as of 0.33.0, with what older releases wrote where that differs."""

from __future__ import annotations

import re
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.engines.file_names import FileNames
from moeopt.engines.layout import Layout
from moeopt.engines.log import FILE, NOT_ON_TRITON, Backend, LogFacts, LogLine, ServerLog
from moeopt.engines.spec import TRITON_STAGES, TRITON_WARPS, EngineSpec, KernelFile, Server
from moeopt.errors import InvalidInputError

_TRITON: Final = "--moe-backend triton"
# Backends of the oracles under fused_moe/oracle.
_READS: Final = frozenset({"TRITON", "BATCHED_TRITON", "EMULATION", "TRITON_MXFP8"})
_SOMETIMES: Final = {
    "DEEPGEMM": "DeepGEMM runs, and Triton only for shapes that DeepGEMM does not take",
    "VLLM_CUTLASS": "CUTLASS runs, and Triton for the smallest batches on some GPUs",
}


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
    logged = facts.of("backend")
    name = logged[0].values["backend"] if logged else facts.setting("moe_backend", "backend_option")
    if name is None or name == "auto":
        return None
    key = name.strip().upper().replace(" ", "_")
    if key in _READS:
        return Backend(name, True, f"{name} is the Triton kernel and reads config files")
    if key in _SOMETIMES:
        return Backend(name, None, _SOMETIMES[key])
    return Backend(name, False, f"{name} reads no Triton config file")


def _parallel(facts: LogFacts) -> tuple[int, int]:
    tp = facts.number("tensor_parallel_size")
    return tp, tp if facts.is_on("enable_expert_parallel") else 1


def _triton_option(facts: LogFacts) -> str | None:
    nvfp4 = any(event.values.get("kind") == "NvFp4" for event in facts.of("backend"))
    return None if nvfp4 or facts.setting("quantization") in NOT_ON_TRITON else _TRITON


_LOG: Final = ServerLog(
    lines=(
        LogLine("tuned", "for MoE layer", rf"Using configuration from (?P<path>{FILE}) for MoE layer"),
        LogLine(
            "default",
            "Using default MoE config",
            rf"Using default MoE config\.(?:[^\n]{{0,200}}?Config file not found at \[?'?(?P<asked>{FILE}))?",
        ),
        LogLine(
            "backend",
            "MoE",
            r"Using '?(?P<backend>[\w ]{2,60}?)'? (?P<kind>Unquantized|Fp8|NvFp4|WNA16|Mxfp4|MxFp8|Int8|W4A8) MoE "
            r"(?:LoRA )?backend",
        ),
        LogLine(
            "backend",
            "MoE",
            r"Using (?P<backend>[\w ]{2,60}?) (?:kernels?|backend) for (?P<kind>[\w ]{2,30}) MoE",
        ),
        LogLine("version", "LLM engine (v", r"LLM engine \(v(?P<version>[^)\s]{1,60})\)"),
    ),
    starts=("non-default args: ",),
    lists=("non-default args", "LLM engine (v"),
    opening="the engine's config",
    settings=("model", "tensor_parallel_size", "quantization", "moe_backend", "enable_expert_parallel", "log_level"),
    anywhere=(LogLine("backend_option", "--moe-backend", r"--moe-backend[= ](?P<value>[a-z][a-z0-9_]*)"),),
    own=("moe_backend", "tensor_parallel_size"),
    shown=("moe_backend", "backend_option", "quantization"),
    backend=_backend,
    parallel=_parallel,
    triton_option=_triton_option,
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
    server=Server("vllm serve {model}", "--tensor-parallel-size", triton=lambda shape: _TRITON, tuned=_TRITON),
    log=_LOG,
    more_keys=frozenset({"num_ctas", "SPLIT_K"}),
    fixed_keys={"SPLIT_K": 1},
    added_keys=_added_keys,
    clamps_block_k=True,
    notes_triton_version=True,
)
