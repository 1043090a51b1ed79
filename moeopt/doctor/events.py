"""Findings from single messages of a log."""

from __future__ import annotations

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.doctor.diagnosis import Evidence, Finding
from moeopt.doctor.scan import LogFacts
from moeopt.engines.names import Engine
from moeopt.export.names import ConfigName


def event_findings(facts: LogFacts) -> list[Finding]:
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
    if clashes := facts.of("sglang_block_m"):
        findings.append(
            Finding(
                "warning", "block_m",
                "The up and down files differ in BLOCK_SIZE_M: SGLang runs down with up's value, which nobody "
                "measured. Export both files together.", tuple(Evidence(e.text, e.line) for e in clashes[:3]),
            )
        )  # fmt: skip
    for event in facts.of("bad_version_directory"):
        findings.append(
            Finding(
                "error", "bad_directory",
                f"A directory triton_* whose rest is not numbers ({event.values['text']!r}) may have made SGLang's "
                "loader raise: rename it.", (Evidence(event.text, event.line),),
            )
        )  # fmt: skip
    return findings


def shape_findings(
    facts: LogFacts, names: list[ConfigName], shape: MoEShape | None, gpu: GpuSpec | None, engine: Engine
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
