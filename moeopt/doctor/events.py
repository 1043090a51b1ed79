"""Findings from single messages of a log."""

from __future__ import annotations

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.doctor.diagnosis import Evidence, Finding
from moeopt.engines import EngineSpec
from moeopt.engines.log import LogFacts
from moeopt.export.names import ConfigName


def event_findings(facts: LogFacts, spec: EngineSpec) -> list[Finding]:
    findings = []
    for event in facts.of("out_of_resource"):
        findings.append(
            Finding(
                "error", "out_of_resource",
                f"A kernel asked for {int(event.values['required']):,} bytes of shared memory and the GPU has "
                f"{int(event.values['limit']):,}: if it is the MoE kernel, its config is of another GPU; check the "
                "directory with moeopt doctor --config-dir.", (Evidence(event.text, event.line),),
            )
        )  # fmt: skip
    if clashes := facts.of("block_m"):
        findings.append(
            Finding(
                "warning", "block_m",
                f"The up and down files differ in BLOCK_SIZE_M: {spec.title} runs down with up's value, which nobody "
                "measured. Export both files together.", tuple(Evidence(e.text, e.line) for e in clashes[:3]),
            )
        )  # fmt: skip
    for event in facts.of("bad_directory"):
        findings.append(
            Finding(
                "error", "bad_directory",
                f"A directory {spec.layout.prefix}* whose rest is not numbers ({event.values['text']!r}) may have made "
                f"{spec.title}'s loader raise: rename it.", (Evidence(event.text, event.line),),
            )
        )  # fmt: skip
    return findings


def shape_findings(
    facts: LogFacts, names: list[ConfigName], shape: MoEShape | None, gpu: GpuSpec | None, engine: str
) -> list[Finding]:
    if shape is None or not names:
        return []
    expected = ConfigName.of(engine, shape, gpu.name if gpu is not None else names[0].device)
    if any((n.num_experts, n.intermediate_size, n.dtype) == (expected.num_experts, expected.intermediate_size,
                                                             expected.dtype) for n in names):  # fmt: skip
        return []
    return [
        Finding(
            "warning",
            "other_shape",
            f"The shape that was given is of {expected}, and the server asks for {names[0]}: tune what the server asks "
            "for (a fused shared expert counts in E; N is per GPU).",
        )
    ]
