"""Lines of a log that warn of a default config and are no MoE matter: dense GEMM, Mamba, LoRA."""

from __future__ import annotations

import re
from typing import Final

from moeopt.doctor.diagnosis import Finding, lines_of
from moeopt.engines import EngineSpec
from moeopt.engines.log import LogFacts

_DENSE: Final = re.compile(r"N=(\d+),K=(\d+),")
_MOST: Final = 4
# SM120's CUTLASS kernel of SGLang takes shapes whose N and K are multiples of this.
_CUTLASS: Final = 128


def other_kernel_findings(facts: LogFacts, spec: EngineSpec, sm: int | None) -> list[Finding]:
    """A note for each kind of such lines.

    Args:
        facts: What was read.
        spec: The engine.
        sm: Compute capability of the server's GPU as 90 or 120, or None.
    """
    findings = []
    if dense := facts.of("dense"):
        shapes = [m.groups() for e in dense if (m := _DENSE.search(e.values.get("asked", "")))]
        named = ", ".join(f"N={n} K={k}" for n, k in shapes[:_MOST]) + (", ..." if len(shapes) > _MOST else "")
        message = (
            f"Not an MoE matter: dense {dense[0].values['kind']} layers in blocks{f' ({named})' if named else ''} run "
            f"the default config of {spec.title}'s dense GEMM kernel. {spec.log.dense} moeopt does not tune them."
        )
        odd = [(int(n), int(k)) for n, k in shapes if int(n) % _CUTLASS or int(k) % _CUTLASS]
        if sm is not None and sm // 10 == 12 and spec.replaces_bundled and shapes:
            message += f" On SM{sm} CUTLASS takes shapes of multiples of 128; {len(odd)} of these are not."
        findings.append(Finding("note", "dense", message, lines_of(dense, 2)))
    if mamba := facts.of("mamba"):
        message = (
            "Not an MoE matter: Mamba's state update runs its default config; its files (headdim=..,dstate=..) are "
            f"read from {spec.variable}, too, and moeopt does not tune them."
        )
        findings.append(Finding("note", "mamba", message, lines_of(mamba, 2)))
    if lora := facts.of("lora"):
        message = "Not an MoE matter: LoRA kernels run their default configs; moeopt does not tune them."
        findings.append(Finding("note", "lora", message, lines_of(lora, 2)))
    return findings
