"""Server options that do not do what they promise, and what was seen of them."""

from __future__ import annotations

import re

from moeopt.core.gpu import GpuSpec
from moeopt.doctor.diagnosis import Evidence, Finding
from moeopt.doctor.scan import LogFacts
from moeopt.errors import UnknownGpuError
from moeopt.export.names import ConfigName
from moeopt.export.read import Severity


def gpu_generation(facts: LogFacts, names: list[ConfigName], gpu: GpuSpec | None) -> int | None:
    """Compute capability of the server's GPU, as 90 or 120, or None where nothing says it."""
    if gpu is not None:
        return gpu.sm
    for name in names:
        try:
            return GpuSpec.by_name(name.device).sm
        except UnknownGpuError:
            if "RTX_PRO" in name.device and "Blackwell" in name.device:
                return 120
    for event in facts.of("sglang_picked"):
        if match := re.search(r"SM(12\d)", event.values["gpu"]):
            return int(match[1])
    return None


def misleading_flags(facts: LogFacts, sm: int | None) -> list[Finding]:
    """Findings for the options in use that mislead on this GPU (a note where the GPU is not known)."""
    if sm is not None and sm // 10 != 12:
        return []
    severity: Severity = "warning" if sm is not None else "note"
    where = f"SM{sm}" if sm is not None else "an RTX PRO 6000 or another SM120 GPU"
    findings = []
    if (
        facts.is_on("enable_flashinfer_allreduce_fusion")
        or facts.of("allreduce_flag")
        or (facts.setting("flashinfer_allreduce_fusion_backend") is not None)
    ):
        findings.append(
            Finding(
                severity,
                "allreduce_fusion",
                f"FlashInfer's all-reduce fusion does nothing on {where}: SGLang checks for SM90 and SM100 only. It "
                "was seen to turn piecewise CUDA graphs off and to cut max_running_requests from 48 to 26: leave "
                "--enable-flashinfer-allreduce-fusion (--flashinfer-allreduce-fusion-backend) away.",
                _seen(
                    facts,
                    ("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend"),
                    "allreduce_flag",
                ),
            )
        )
    if facts.is_on("enable_fused_moe_sum_all_reduce") or facts.of("sum_allreduce_flag"):
        findings.append(
            Finding(
                "note",
                "sum_all_reduce",
                f"--enable-fused-moe-sum-all-reduce changed nothing measurable on {where}.",
                _seen(facts, ("enable_fused_moe_sum_all_reduce",), "sum_allreduce_flag"),
            )
        )
    return findings


def _seen(facts: LogFacts, settings: tuple[str, ...], kind: str) -> tuple[Evidence, ...]:
    lines = [
        Evidence(f"{key}={facts.settings[key][0]}", facts.settings[key][1])
        for key in settings
        if facts.setting(key) not in (None, "False")
    ]
    return (*lines, *(Evidence(event.text, event.line) for event in facts.of(kind)))
