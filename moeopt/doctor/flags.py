"""Server options that do not do what they promise, and what was seen of them."""

from __future__ import annotations

import re

from moeopt.core.gpu import GpuSpec
from moeopt.doctor.diagnosis import Evidence, Finding
from moeopt.engines import EngineSpec
from moeopt.engines.log import LogFacts, MisleadingOption
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
    for event in facts.of("backend"):
        if match := re.search(r"SM(12\d)", event.values.get("gpu", "")):
            return int(match[1])
    return None


def misleading_flags(facts: LogFacts, spec: EngineSpec, sm: int | None) -> list[Finding]:
    """Findings for the options in use that mislead on this GPU (a note where the GPU is not known)."""
    if sm is not None and sm // 10 != 12:
        return []
    where = f"SM{sm}" if sm is not None else "an RTX PRO 6000 or another SM120 GPU"
    findings = []
    for option in spec.log.misleading:
        if seen := _seen(facts, option):
            severity: Severity = "warning" if sm is not None and option.harms else "note"
            findings.append(Finding(severity, option.code, option.message.format(where=where), seen))
    return findings


def _seen(facts: LogFacts, option: MisleadingOption) -> tuple[Evidence, ...]:
    lines = [
        Evidence(f"{key}={facts.settings[key][0]}", facts.settings[key][1])
        for key in option.settings
        if (facts.setting(key) or "false").lower() not in ("false", "0")
    ]
    return (*lines, *(Evidence(event.text, event.line) for event in facts.of(option.kind)))
