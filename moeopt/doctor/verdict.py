"""Verdict on what a log says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from moeopt import engines
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.doctor.commands import fitted, tune_commands
from moeopt.doctor.diagnosis import Diagnosis, Finding, LayerState, State, lines_of
from moeopt.doctor.events import capability, event_findings, misleading_options, shape_findings
from moeopt.doctor.flashinfer import flashinfer_findings
from moeopt.doctor.layers import layers_of
from moeopt.doctor.other_kernels import other_kernel_findings
from moeopt.doctor.unread import Case, ignored, no_config_line, not_read
from moeopt.engines import EngineSpec
from moeopt.engines.log import TELLING, Backend, Event, LogFacts
from moeopt.models.request import ModelRequest


def engine_of(facts: LogFacts) -> str | None:
    """Whose log it is, or None where nothing says so: settings that only one engine has, else its lines."""
    telling = {event.engine for event in facts.of(*TELLING)}
    for spec in engines.every():
        if facts.setting(*spec.log.own):
            return spec.name
    return next((spec.name for spec in engines.every() if spec.name in telling), None)


def judge_log(
    facts: LogFacts,
    *,
    engine: str | None = None,
    gpu: GpuSpec | None = None,
    shape: MoEShape | None = None,
    request: ModelRequest | None = None,
) -> Diagnosis:
    """What a server log says of its MoE configs.

    Args:
        facts: What :func:`~moeopt.doctor.scan.scan_log` read.
        engine: Whose log it is; None finds out.
        gpu: The server's GPU where the log does not name it.
        shape: The layer, to compare with what the server asked for.
        request: The model and its layout, for the commands to run next.
    """
    engine = engine or engine_of(facts)
    if engine is None:
        return _no_log(facts)
    spec = engines.get(engine)
    facts = replace(facts, events=[e for e in facts.events if e.engine in ("", engine)])
    layers, findings = layers_of(facts, spec)
    names = [layer.name for layer in layers if layer.name is not None]
    backend = spec.log.backend(facts, bool(layers))
    findings += event_findings(facts, spec)
    if request is None or not any(fitted(request, name) for name in names):
        findings += shape_findings(names, shape, gpu, spec)
    findings += misleading_options(facts, names, gpu, spec)
    findings += other_kernel_findings(facts, spec, capability(facts, names, gpu))
    findings += flashinfer_findings(facts)
    if facts.starts > 1:
        message = f"The log holds {facts.starts} server starts: the last, from line {facts.start_line}, is judged."
        findings.append(Finding("note", "starts", message))
    case, mode = Case(facts, spec, backend, layers, findings), spec.log.ignoring
    if mode is not None and (facts.of("ignored") or facts.is_on(mode.setting)):
        return ignored(case, mode)
    return _config_lines(case, shape, request) if layers else no_config_line(case)


def _no_log(facts: LogFacts) -> Diagnosis:
    titles = " or ".join(spec.title for spec in engines.every())
    lines = " or ".join(f"with {spec.log.opening} ({spec.title})" for spec in engines.every())
    message = f"No line {lines} was found: give the whole output of the server from its start, at log level info."
    verdict = f"Nothing in these {facts.lines:,} lines is of {titles} starting a server with an MoE model."
    return Diagnosis("no_log", verdict, None, findings=(Finding("error", "no_log", message),))


def _config_lines(case: Case, shape: MoEShape | None, request: ModelRequest | None) -> Diagnosis:
    first: list[Finding] = []
    facts, backend, spec = case.facts, case.backend, case.spec
    if backend is not None and backend.reads is False and not spec.log.mixes:
        return not_read(case, backend)
    others = [(layer, other) for layer in case.layers if (other := _other_kernel(case, layer)) is not None]
    layers = [layer for layer in case.layers if layer not in [other for other, _ in others]]
    if not layers:
        return not_read(case, others[0][1])
    for layer, other in others:
        message = f"{other.why}: the line about {layer.name or 'a layer'} means nothing, that layer reads no file."
        first.append(Finding("note", "other_kernel", message, lines_of(facts.of("backend", "marlin"))))
    if not others and backend is not None and backend.reads is False:
        message = f"{backend.why}; the Triton kernel runs for some layers all the same."
        first.append(Finding("note", "mixed", message, lines_of(facts.of("mixed"))))
    worst = "tuned"
    for layer in layers:
        for roles, state in _states(layer, spec):
            finding = _layer_finding(facts, layer, roles, state)
            if finding is not None:
                first.append(finding)
                worst = min(worst, finding.code, key=_RANK.index)
    failure = next((f for f in case.findings if f.code in _FAILURES), None)
    if failure is not None and worst != "default":
        worst = "fails"
    bad = [layer for layer in layers if worst == "fails" or _is_untuned(layer, spec)]
    if worst not in ("tuned", "down_reuses_up", "fails"):
        bad = [layer for layer in bad if layer.up != "tuned"] or bad
    # Names of what is wrong alone, where that is not everything.
    named = ", ".join(str(layer.name) if layer.name else "a layer" for layer in (bad or layers))
    verdict = _VERDICTS[worst].format(engine=spec.title, names=named, why=_FAILURES[failure.code] if failure else "")
    after = () if worst == "tuned" else tune_commands(spec, facts, [layer.name for layer in bad], shape, request)
    return case.answer(worst, verdict, first, after)


def _is_untuned(layer: LayerState, spec: EngineSpec) -> bool:
    return any(state in ("default", "fallback", "up_file") for _, state in _states(layer, spec))


def _other_kernel(case: Case, layer: LayerState) -> Backend | None:
    """The kernel that reads no file and runs this layer, where the log tells the backends of layers apart."""
    facts, log = case.facts, case.spec.log
    if not log.kinds:
        return None
    dtype = layer.name.dtype if layer.name is not None else None
    mine = [e for e in facts.of("backend") if dtype in log.kinds.get(e.values.get("kind", "").lower(), ())]
    # A release that names backends names that of every kind of weights; a line about a file beside none of this kind
    # is of Marlin, which looked files up in vain until 0.14, or of LoRA.
    found = log.backend(replace(facts, events=mine), True) if mine else case.backend
    return found if found is not None and found.reads is False else None


# What is wrong with a file that is read, for the verdict.
_FAILURES: Final = {
    "out_of_resource": "a launch asks for more than the GPU has",
    "unknown_key": "an entry has a key that the kernel does not know",
    "bad_key": "a key of it is no batch size",
}
_RANK: Final = ("default", "fallback", "down_reuses_up", "tuned")
_VERDICTS: Final = {
    "fails": "Read, and the server fails on it: {engine} reads {names}, and {why}.",
    "tuned": "In use and tuned: {engine} reads {names}.",
    "fallback": "Not tuned for this Triton version: {engine} reads a file of another one for {names}.",
    "down_reuses_up": "Half tuned: {engine} reads {names}, and runs the down projection with its configs.",
    "default": "Not tuned: {engine} found no file for {names} and runs its default config.",
}


def _states(layer: LayerState, spec: EngineSpec) -> list[tuple[tuple[Role, ...], State]]:
    """The states of both projections; one where they are the same, or where one file serves both."""
    if not spec.split:
        return [(("up",), layer.up)]
    if layer.up == layer.down:
        return [(ROLES, layer.up)]
    return [(("up",), layer.up), (("down",), layer.down)]


def _layer_finding(facts: LogFacts, layer: LayerState, roles: tuple[Role, ...], state: State) -> Finding | None:
    if state not in ("default", "fallback", "up_file"):
        return None
    events = [e for e in facts.of(state) if any(_about(e, role, layer) for role in roles)]
    shown = lines_of(events)
    times = sum(e.count for e in events)
    of = f" of E={layer.name.num_experts}, N={layer.name.intermediate_size}" if layer.name is not None else ""
    which = f"the {' and '.join(roles)} projection{'s' if len(roles) > 1 else ''}{of}"
    if state == "default":
        path = layer.up_path if "up" in roles else layer.down_path
        where = f" It looked for {path}." if path else ""
        message = f"No config file for {which}: the default config runs (logged {times} times).{where}"
        return Finding("error", "default", message, shown)
    if state == "fallback":
        version = events[0].values["version"] if events else "another version"
        message = (
            f"A config that was tuned with Triton {version} runs for {which}: configs age with Triton, so tune with "
            "the server's own version."
        )
        return Finding("warning", "fallback", message, shown)
    return Finding("warning", "down_reuses_up", f"There is no _down file for {which}: it runs up's config.", shown)


def _about(event: Event, role: Role, layer: LayerState) -> bool:
    path = event.values.get("asked") or event.values.get("path")
    return path is None or layer.name is None or path.rpartition("/")[2] == str(layer.name.for_role(role))


def asked_paths(facts: LogFacts) -> list[Path]:
    """The paths that the server asked for, in the order of the log."""
    return [Path(p) for e in facts.events for p in (e.values.get("asked") or e.values.get("path"),) if p]
