"""Findings from single messages and settings of a log."""

from __future__ import annotations

import re

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.doctor.diagnosis import Evidence, Finding, lines_of
from moeopt.engines import EngineSpec
from moeopt.engines.log import LogFacts
from moeopt.errors import UnknownGpuError
from moeopt.export.names import ConfigName
from moeopt.export.read import Severity


def event_findings(facts: LogFacts, spec: EngineSpec) -> list[Finding]:
    """What went wrong while configs were read and launched."""
    findings = []
    for event in facts.of("out_of_resource"):
        message = (
            f"A kernel asked for {int(event.values['required']):,} bytes of shared memory and the GPU has "
            f"{int(event.values['limit']):,}: if it is the MoE kernel, its config is of another GPU; check the "
            "directory with moeopt doctor --config-dir."
        )
        findings.append(Finding("error", "out_of_resource", message, lines_of([event])))
    if clashes := facts.of("block_m"):
        message = (
            f"The up and down files differ in BLOCK_SIZE_M: {spec.title} runs down with up's value, which nobody "
            "measured. Export both files together."
        )
        findings.append(Finding("warning", "block_m", message, lines_of(clashes, 3)))
    for event in facts.of("unknown_key"):
        key = event.values["key"]
        message = (
            f"An entry of a config file has the key {key!r}, which the kernel does not know on this GPU: the launch "
            "fails. Remove it, or tune again."
        )
        findings.append(Finding("error", "unknown_key", message, lines_of([event])))
    for event in facts.of("bad_number"):
        text = event.values["text"]
        if spec.layout.versioned and text not in ("triton_version", "") and not text.startswith("_"):
            code = "bad_directory"
            message = (
                f"A directory {spec.layout.prefix}* whose rest is not numbers ({text!r}) may have made {spec.title}'s "
                "loader raise: rename it."
            )
        else:
            code = "bad_key"
            message = (
                f"The key {text!r} of a config file is no batch size, and {spec.title}'s loader raises over it: remove "
                "it" + (" (vLLM's tuner writes it into its own files)." if text == "triton_version" else ".")
            )
        findings.append(Finding("error", code, message, lines_of([event])))
    findings += _old_release(facts, spec)
    for event in facts.of("refined"):
        message = (
            f"vLLM cut the checkpoint's blocks of scales ([{event.values['checkpoint']}]) into "
            f"[{event.values['block']}], as N on a GPU is no multiple of them: that is the block of the file's name."
        )
        findings.append(Finding("note", "refined", message, lines_of([event])))
    for event in facts.of("padded"):
        message = (
            f"vLLM padded N on a GPU to {event.values['n']}, whole blocks of scales, for a backend that cannot refine "
            "them: Triton's file, for which N is not padded, is of another name."
        )
        findings.append(Finding("note", "padded", message, lines_of([event])))
    for event in facts.of("no_configs"):
        findings.append(Finding("error", "no_configs", _no_configs(event.values["path"], spec), lines_of([event])))
    return findings


def _old_release(facts: LogFacts, spec: EngineSpec) -> list[Finding]:
    """Paths without the directory of a Triton version, where files of this engine have one now."""
    if not spec.layout.versioned:
        return []
    for event in facts.of("tuned", "default"):
        folder, _, name = (event.values.get("asked") or event.values.get("path") or "").rpartition("/")
        if name and not spec.layout.is_version(folder.rpartition("/")[2]):
            message = (
                f"This release of {spec.title} looks in {folder} itself and knows no {spec.variable}: copy the up file "
                "of the tune there, which serves both projections."
            )
            return [Finding("warning", "old_release", message, lines_of([event]))]
    return []


def _no_configs(path: str, spec: EngineSpec) -> str:
    """The directory that an engine lists below the one that its variable names is not there."""
    parent = path.removesuffix(f"/{spec.layout.parent}")
    if spec.layout.parent and parent.endswith(f"/{spec.layout.parent}"):
        above = parent.removesuffix(f"/{spec.layout.parent}")
        return f"{spec.variable} names {parent}, and {spec.title} looks in {path}: set it to {above}."
    return f"{spec.variable} names {parent}, which has no {spec.layout.parent}/: {spec.title}'s loader raises over it."


def shape_findings(
    names: list[ConfigName], shape: MoEShape | None, gpu: GpuSpec | None, spec: EngineSpec
) -> list[Finding]:
    """Whether the server asks for the shape that was given."""
    if shape is None or not names:
        return []
    expected = ConfigName.of(spec.name, shape, gpu.name if gpu is not None else names[0].device)
    wanted = (expected.num_experts, expected.intermediate_size, expected.dtype)
    if any((name.num_experts, name.intermediate_size, name.dtype) == wanted for name in names):
        return []
    message = (
        f"The shape that was given is of {expected}, and the server asks for {names[0]}: tune what the server asks "
        "for (a fused shared expert counts in E; N is per GPU)."
    )
    return [Finding("warning", "other_shape", message)]


def misleading_options(
    facts: LogFacts, names: list[ConfigName], gpu: GpuSpec | None, spec: EngineSpec
) -> list[Finding]:
    """Findings for the options in use that mislead on this GPU (a note where the GPU is not known)."""
    sm = capability(facts, names, gpu)
    if sm is not None and sm // 10 != 12:
        return []
    where = f"SM{sm}" if sm is not None else "an RTX PRO 6000 or another SM120 GPU"
    findings = []
    for option in spec.log.misleading:
        on = [key for key in option.settings if (facts.setting(key) or "false").lower() not in ("false", "0")]
        seen = (*settings_of(facts, *on), *lines_of(facts.of(option.kind)))
        if seen:
            severity: Severity = "warning" if sm is not None and option.harms else "note"
            findings.append(Finding(severity, option.code, option.message.format(where=where), seen))
    return findings


def settings_of(facts: LogFacts, *keys: str) -> tuple[Evidence, ...]:
    """Those of these settings that are there, with their lines."""
    there = [key for key in keys if facts.setting(key) not in (None, "none")]
    return tuple(Evidence(f"{key}={facts.settings[key][0]}", facts.settings[key][1]) for key in there)


def capability(facts: LogFacts, names: list[ConfigName], gpu: GpuSpec | None) -> int | None:
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
