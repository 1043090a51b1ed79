"""Diagnoses: the verdict first, then the evidence, then the command to run next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from moeopt.engines.log import Event
from moeopt.export.names import ConfigName
from moeopt.export.read import Severity

State = Literal["tuned", "fallback", "up_file", "default", "not_seen"]


@dataclass(frozen=True)
class Evidence:
    """A line of the log, or a file.

    Attributes:
        text: What is there.
        line: Its number, from 1, or None for a file.
    """

    text: str
    line: int | None = None

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


def lines_of(events: Iterable[Event], most: int = 4) -> tuple[Evidence, ...]:
    """The lines of the first of these messages."""
    return tuple(Evidence(event.text, event.line) for event in islice(events, most))


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: ``error`` and ``warning`` are what someone should act on, a ``note`` is not.
        code: A short word for programs.
        message: One or two sentences: what is, and what to do.
        evidence: Where it is seen.
    """

    severity: Severity
    code: str
    message: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class LayerState:
    """What a server does for one MoE layer shape.

    Attributes:
        name: What the file that it asked for is called (up), or None where the log does not say.
        up: For the up projection.
        down: For the down projection.
        up_path: The file that is read, or the one that was asked for.
        down_path: The same for down.
    """

    name: ConfigName | None
    up: State
    down: State
    up_path: Path | None = None
    down_path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "file": str(self.name) if self.name else None,
            "experts": self.name.num_experts if self.name else None,
            "intermediate": self.name.intermediate_size if self.name else None,
            "device": self.name.device if self.name else None,
            "dtype": self.name.dtype if self.name else None,
            "up": {"state": self.up, "path": str(self.up_path) if self.up_path else None},
            "down": {"state": self.down, "path": str(self.down_path) if self.down_path else None},
        }


@dataclass(frozen=True)
class Diagnosis:
    """The doctor's answer.

    Attributes:
        code: A short word for the verdict.
        verdict: One line.
        engine: Whose log or directory it is, or None where that is not known.
        backend: The MoE backend, or None where that is not known.
        layers: What the server does for each shape.
        findings: Most severe first.
        next: Commands to run, in order.
    """

    code: str
    verdict: str
    engine: str | None
    backend: str | None = None
    layers: tuple[LayerState, ...] = ()
    findings: tuple[Finding, ...] = ()
    next: tuple[str, ...] = field(default=())

    @property
    def status(self) -> int:
        """Exit status: 0 where the files are in use and tuned, 1 where something was found."""
        return int(any(f.severity != "note" for f in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "verdict": {"code": self.code, "text": self.verdict},
            "status": self.status,
            "engine": self.engine,
            "backend": self.backend,
            "layers": [layer.to_dict() for layer in self.layers],
            "findings": [
                {
                    "severity": f.severity,
                    "code": f.code,
                    "message": f.message,
                    "evidence": [{"line": e.line, "text": e.text} for e in f.evidence],
                }
                for f in self.findings
            ],
            "next": list(self.next),
        }

    def __str__(self) -> str:
        lines = [self.verdict]
        for finding in self.findings:
            lines += ["", f"{finding.severity}: {finding.message}"]
            lines += [f"    {evidence}" for evidence in finding.evidence]
        if self.next:
            lines += ["", "run next:", *(f"    {command}" for command in self.next)]
        return "\n".join(lines)


_ORDER = {"error": 0, "warning": 1, "note": 2}


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors first; otherwise in the order in which they were found."""
    return tuple(sorted(findings, key=lambda f: _ORDER[f.severity]))
