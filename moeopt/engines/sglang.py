"""SGLang, as of 0.5.23, with what older releases wrote where that differs."""

from __future__ import annotations

from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.engines import sglang_serving as rules
from moeopt.engines.file_names import FileNames
from moeopt.engines.layout import Layout
from moeopt.engines.log import (
    FILE,
    NOT_ON_TRITON,
    NVFP4,
    Backend,
    Deployment,
    FlashInferTuning,
    IgnoringMode,
    LogFacts,
    LogLine,
    MisleadingOption,
    ServerLog,
)
from moeopt.engines.serving import ServingRules
from moeopt.engines.spec import (
    TRITON_STAGES,
    TRITON_WARPS,
    EngineSpec,
    KernelFile,
    Server,
    sizes_that_divide,
)
from moeopt.errors import InvalidInputError

_SMALL_SHARED_MEMORY: Final = 128 * 1024
_MARLIN_QUANTIZATION: Final = ("awq", "awq_marlin", "gptq", "gptq_marlin")
# --moe-runner-backend values beside triton and auto, and what runs there instead.
_KERNELS: Final = {
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
_FLASHINFER: Final = tuple(name for name, kernels in _KERNELS.items() if kernels.startswith("FlashInfer"))
# Quantisations for which auto picks another backend than Triton.
_AUTO: Final = {
    **dict.fromkeys(NVFP4, "NVFP4 weights have no Triton path"),
    **dict.fromkeys(("awq", "awq_marlin"), "AWQ weights go to Marlin"),
    **dict.fromkeys(("gptq", "gptq_marlin"), "GPTQ weights go to Marlin"),
    "mxfp4": "MXFP4 weights go to FlashInfer's or the triton_kernels package's kernels",
    "mxfp8": "MXFP8 weights go to FlashInfer's kernels",
}
# A file of its own configs directory, which is all that versions before SGLANG_MOE_CONFIG_DIR (0.5.3) read.
_OLD_FILE: Final = r"[^\n]{0,1500}?sglang/srt/layers/moe/fused_moe_triton/configs/[^\n]{1,400}?\.json"
_DEEPEP: Final = frozenset({"deepep", "deepep_v2", "mooncake", "nixl"})


def _device(gpu_name: str) -> str:
    if "/" in gpu_name:
        raise InvalidInputError(f"GPU name {gpu_name!r} has a slash: SGLang would look for a directory of that name")
    return gpu_name.replace(" ", "_")


def _default_config(shape: MoEShape, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
    few = batch_size <= shape.num_experts
    if shape.spec.compute == "fp8" and shape.block_shape:
        return LaunchConfig(64, shape.block_shape[0], shape.block_shape[1], 32, 4, 3)
    if shape.spec.compute == "fp8":
        if gpu.shared_memory_per_block_optin < _SMALL_SHARED_MEMORY:
            return LaunchConfig(32, 64, 256, 1, 4, 4) if few else LaunchConfig(64, 128, 256, 64, 4, 2)
        return LaunchConfig(64, 128, 128, 1, 4, 4) if few else LaunchConfig(128, 256, 128, 32, 8, 4)
    if few:
        return LaunchConfig(16, 32, 64, 1, TRITON_WARPS, TRITON_STAGES)
    return LaunchConfig(64, 64, 32, 8, TRITON_WARPS, TRITON_STAGES)


def _shards(tp: int, ep: int) -> int:
    if tp % ep:
        raise InvalidInputError(f"--ep {ep} does not divide --tp {tp}: SGLang takes --ep {sizes_that_divide(tp)}")
    return tp // ep


def _backend(facts: LogFacts, reads: bool) -> Backend | None:
    name = facts.setting("moe_runner_backend", "backend_option")
    picked = facts.of("backend")
    if picked and name in (None, "auto"):
        name = picked[0].values["backend"]
    if (marlin := facts.of("ct_marlin")) and not reads:
        return Backend("marlin", False, f"compressed-tensors weights go to Marlin (line {marlin[0].line})")
    if name is None:
        return Backend("triton", True, "its lines are in the log") if reads else None
    if name in ("triton", "lora_triton"):
        return Backend(name, True, "the Triton kernel runs and reads config files")
    if name != "auto":
        kernels = _KERNELS.get(name, "other kernels")
        return Backend(name, False, f"{name} runs {kernels}, and these read no Triton config file")
    reason = _AUTO.get(facts.setting("quantization") or "")
    if reason is not None:
        return Backend(name, False, f"auto does not pick Triton here: {reason}")
    exchange = facts.setting("moe_a2a_backend")
    if exchange in _DEEPEP:
        return Backend(name, None, f"with the all-to-all backend {exchange} fp8 experts run in DeepGEMM")
    return Backend(name, True, "auto picks Triton for unquantised, fp8 and int8 experts")


def _triton_option(facts: LogFacts) -> str | None:
    quantization = facts.setting("quantization")
    if quantization in NOT_ON_TRITON:
        return None
    if facts.of("ct_marlin"):
        return rules.TRITON
    return rules.PACKED if quantization in _MARLIN_QUANTIZATION else rules.TRITON


def _deployment(facts: LogFacts) -> Deployment:
    tp, ep = facts.number("tp_size"), facts.number("ep_size")
    # Parts of the MoE layers where they are data-parallel, too (moe_tp = tp / ep / moe_dp).
    copies = facts.number("moe_dp_size")
    fuse = None
    if facts.is_on("disable_shared_experts_fusion"):
        fuse = False
    elif facts.is_on("enforce_shared_experts_fusion"):
        fuse = True
    return Deployment(
        tp=tp // copies if tp % copies == 0 else tp,
        ep=ep,
        start_tp=tp,
        fuse_shared=fuse,
        draft=facts.setting("speculative_draft_model_path"),
    )


_LOG: Final = ServerLog(
    lines=(
        LogLine("tuned", "Using MoE kernel config", rf"Using MoE kernel config from (?P<path>{FILE})"),
        LogLine(
            "fallback",
            "Fallback to triton",
            rf"Config file not found at (?P<asked>{FILE})\. Fallback to triton version (?P<version>[\w.+]+) "
            rf"and use MoE kernel config from (?P<path>{FILE})",
        ),
        LogLine("up_file", "Down MoE config", rf"Down MoE config file not found at (?P<asked>{FILE})"),
        # 0.5.6 to 0.5.15, whatever the up projection runs.
        LogLine(
            "up_file",
            "down_moe=False",
            rf"Using MoE kernel config with down_moe=False\.[^\n]{{0,200}}?Config file not found at (?P<asked>{FILE})",
        ),
        # 0.4.3 and before, which have vLLM's words: the path tells whose they are.
        LogLine("tuned", "for MoE layer", rf"Using configuration from (?P<path>{_OLD_FILE}) for MoE layer"),
        LogLine(
            "default",
            "Using default MoE config",
            rf"Using default MoE config\.[^\n]{{0,200}}?Config file not found at (?P<asked>{_OLD_FILE})",
        ),
        LogLine(
            "default",
            "Using default MoE kernel",
            rf"Using default MoE kernel config\.(?:[^\n]{{0,200}}?Config file not found at (?P<asked>{FILE}))?",
        ),
        LogLine(
            "ignored",
            "Deterministic inference",
            r"Deterministic inference is enabled, using default MoE kernel config",
        ),
        LogLine(
            "block_m",
            "down_moe config",
            r"down_moe config BLOCK_SIZE_M=(?P<down>\d+) does not match up config BLOCK_SIZE_M=(?P<up>\d+) "
            r"at M=(?P<m>\d+)",
        ),
        LogLine("mixed", "MoEMethod has no", r"MoEMethod has no (?P<backend>\w+) path; using triton"),
        LogLine(
            "backend",
            "as MoE runner",
            r"Use (?P<backend>\w+) as MoE runner backend(?: on (?P<gpu>[\w/]+))?",
            before_start=True,
        ),
        LogLine(
            "allreduce_flag",
            "--enable-flashinfer-allreduce",
            r"--enable-flashinfer-allreduce-fusion",
            before_start=True,
        ),
        LogLine("sum_allreduce_flag", "--enable-fused-moe", r"--enable-fused-moe-sum-all-reduce", before_start=True),
        LogLine("ct_marlin", "CompressedTensorsWNA16", r"Using CompressedTensorsWNA16MarlinMoEMethod"),
        LogLine("no_configs", "No such file", r"No such file or directory: '(?P<path>[^'\n]{1,1000}/configs)'"),
        LogLine("ready", "fired up and ready", r"The server is fired up and ready"),
    ),
    starts=("server_args=",),
    lists=("server_args=",),
    opening="server_args",
    settings=(
        "model_path",
        "tp_size",
        "ep_size",
        "moe_dp_size",
        "ep_num_redundant_experts",
        "disable_shared_experts_fusion",
        "enforce_shared_experts_fusion",
        "speculative_draft_model_path",
        "quantization",
        "moe_runner_backend",
        "moe_a2a_backend",
        "enable_flashinfer_allreduce_fusion",
        "flashinfer_allreduce_fusion_backend",
        "enable_fused_moe_sum_all_reduce",
        "enable_deterministic_inference",
        "disable_flashinfer_autotune",
        "log_level",
    ),
    anywhere=(
        LogLine(
            "moe_runner_backend",
            "moe_runner_backend",
            r"moe_runner_backend['\"]?\s*[=:]\s*['\"]?(?P<value>[a-z][a-z0-9_]*)",
        ),
        LogLine("backend_option", "--moe-runner-backend", r"--moe-runner-backend[= ](?P<value>[a-z][a-z0-9_]*)"),
    ),
    own=("moe_runner_backend", "model_path"),
    shown=("moe_runner_backend", "backend_option", "quantization", "moe_a2a_backend"),
    backend=_backend,
    deployment=_deployment,
    triton_option=_triton_option,
    # fp8 experts under a FlashInfer backend
    mixes=True,
    ignoring=IgnoringMode(
        code="deterministic",
        setting="enable_deterministic_inference",
        title="deterministic inference",
        message="Deterministic inference makes SGLang ignore every MoE config file, and run 64/64/32 at all batch "
        "sizes.",
    ),
    dense="Its files are those of the package alone (kernels/ops/gemm/configs): no variable names another directory.",
    flashinfer=FlashInferTuning("moe_runner_backend", _FLASHINFER, "disable_flashinfer_autotune"),
    misleading=(
        MisleadingOption(
            code="allreduce_fusion",
            settings=("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend"),
            kind="allreduce_flag",
            harms=True,
            message="FlashInfer's all-reduce fusion does nothing on {where}: SGLang checks for SM90 and SM100 only. It "
            "was seen to turn piecewise CUDA graphs off and to cut max_running_requests from 48 to 26: leave "
            "--enable-flashinfer-allreduce-fusion (--flashinfer-allreduce-fusion-backend) away.",
        ),
        MisleadingOption(
            code="sum_all_reduce",
            settings=("enable_fused_moe_sum_all_reduce",),
            kind="sum_allreduce_flag",
            harms=False,
            message="--enable-fused-moe-sum-all-reduce changed nothing measurable on {where}.",
        ),
    ),
)

SGLANG: Final = EngineSpec(
    name="sglang",
    title="SGLang",
    kernel=KernelFile(
        variable="MOEOPT_SGLANG_KERNEL",
        versions="0.5.5 to 0.5.23",
        paths=(
            "kernels/ops/moe/fused_moe_triton_kernels.py",
            "srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_kernels.py",
            "srt/layers/moe/fused_moe_triton/fused_moe_triton_kernels.py",
        ),
        adapter="moeopt.kernels.sglang:SglangKernel",
    ),
    names=FileNames(device=_device, separator=", ", per_channel=True, split=True, packed_int4=True),
    layout=Layout(parent="configs", prefix="triton_"),
    variable="SGLANG_MOE_CONFIG_DIR",
    replaces_bundled=True,
    bundled=("srt/layers/moe/moe_runner/triton_utils", "srt/layers/moe/fused_moe_triton"),
    default_config=_default_config,
    shards=_shards,
    server=Server(
        command="python -m sglang.launch_server --model-path {model}",
        tp_option="--tp",
        kept=(
            "ep_size",
            "moe_dp_size",
            "ep_num_redundant_experts",
            "disable_shared_experts_fusion",
            "enforce_shared_experts_fusion",
            "quantization",
            "moe_runner_backend",
        ),
    ),
    serving=ServingRules(rules.serving, rules.triton_option, refusal=rules.refusal),
    log=_LOG,
    fuses_shared_experts=True,
)
