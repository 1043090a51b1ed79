"""From what a log says to a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.doctor import commands
from moeopt.doctor.backends import Backend, sglang_backend, vllm_backend
from moeopt.doctor.diagnosis import Diagnosis, Evidence, Finding, LayerState, State, by_severity
from moeopt.doctor.events import event_findings, shape_findings
from moeopt.doctor.flags import gpu_generation, misleading_flags
from moeopt.doctor.layers import SGLANG_CONFIG_EVENTS, VLLM_CONFIG_EVENTS, layers_of
from moeopt.doctor.scan import Event, LogFacts
from moeopt.doctor.unread import TITLES, deterministic, evidence, no_config_line, not_read
from moeopt.engines.names import Engine

_SGLANG_EVENTS: Final = (*SGLANG_CONFIG_EVENTS, "sglang_block_m", "sglang_fp8_uses_triton", "sglang_picked")
_VLLM_EVENTS: Final = (*VLLM_CONFIG_EVENTS, "vllm_backend", "vllm_backend_for", "vllm_version")


def engine_of(facts: LogFacts) -> Engine | None:
    """Whose log it is, or None where nothing says so."""
    if facts.of(*_SGLANG_EVENTS) or facts.setting("moe_runner_backend", "model_path"):
        return "sglang"
    if facts.of(*_VLLM_EVENTS) or facts.setting("moe_backend", "tensor_parallel_size"):
        return "vllm"
    return None


def judge_log(
    facts: LogFacts,
    *,
    engine: Engine | None = None,
    gpu: GpuSpec | None = None,
    shape: MoEShape | None = None,
    model: str | None = None,
) -> Diagnosis:
    """What a server log says of its MoE configs.

    Args:
        facts: What :func:`~moeopt.doctor.scan.scan_log` read.
        engine: Whose log it is; None finds out.
        gpu: The server's GPU where the log does not name it.
        shape: The layer, to compare with what the server asked for.
        model: The model's directory, for the command to run next.
    """
    engine = engine or engine_of(facts)
    if engine is None:
        return Diagnosis(
            "no_log",
            f"Nothing in these {facts.lines:,} lines is of SGLang or vLLM starting a server with an MoE model.",
            None,
            findings=(
                Finding(
                    "error",
                    "no_log",
                    "No line with server_args (SGLang) or with the engine's config (vLLM) was found: give the whole "
                    "output of the server from its start, at log level info.",
                ),
            ),
        )
    layers, findings = layers_of(facts, engine)
    names = [layer.name for layer in layers if layer.name is not None]
    backend = _backend(facts, engine, bool(layers))
    findings += [*event_findings(facts), *shape_findings(facts, names, shape, gpu, engine)]
    findings += misleading_flags(facts, gpu_generation(facts, names, gpu)) if engine == "sglang" else []
    if facts.starts > 1:
        findings.append(
            Finding("note", "starts", f"The log holds {facts.starts} server starts: the last, from line "
                    f"{facts.start_line}, is judged.")
        )  # fmt: skip
    if facts.of("sglang_deterministic") or facts.is_on("enable_deterministic_inference"):
        return deterministic(facts, engine, backend, layers, findings)
    if not layers:
        return no_config_line(facts, engine, backend, findings)
    return _config_lines(facts, engine, backend, layers, findings, shape, model)


def _backend(facts: LogFacts, engine: Engine, reads: bool) -> Backend | None:
    if engine == "vllm":
        logged = facts.of("vllm_backend", "vllm_backend_for")
        name = logged[0].values["backend"] if logged else facts.setting("moe_backend", "backend_option")
        return vllm_backend(name) if name is not None and name != "auto" else None
    name = facts.setting("moe_runner_backend", "backend_option")
    picked = facts.of("sglang_picked")
    if picked and name in (None, "auto"):
        name = picked[0].values["backend"]
    if name is None:
        return Backend("triton", True, "its lines are in the log") if reads else None
    return sglang_backend(name, facts.setting("quantization"), facts.setting("moe_a2a_backend"))


def _config_lines(
    facts: LogFacts,
    engine: Engine,
    backend: Backend | None,
    layers: list[LayerState],
    findings: list[Finding],
    shape: MoEShape | None,
    model: str | None,
) -> Diagnosis:
    first: list[Finding] = []
    if backend is not None and backend.reads is False:
        # vLLM's Marlin, and SGLang's fp8 experts under a FlashInfer backend.
        if engine == "vllm":
            return not_read(facts, engine, backend, layers, findings)
        first.append(Finding("note", "mixed", f"{backend.why}; the Triton kernel runs for some layers all the same.",
                             evidence(facts, "sglang_fp8_uses_triton")))  # fmt: skip
    worst = "tuned"
    for layer in layers:
        for roles, state in _states(layer, engine):
            finding = _layer_finding(facts, layer, roles, state)
            if finding is not None:
                first.append(finding)
                if _RANK.index(finding.code) < _RANK.index(worst):
                    worst = finding.code
    names = ", ".join(str(layer.name) if layer.name else "a layer" for layer in layers)
    verdict = _VERDICTS[worst].format(engine=TITLES[engine], names=names)
    bad = next((layer for layer in layers if "tuned" not in (layer.up,)), layers[0])
    if worst == "down_reuses_up":
        bad = next(layer for layer in layers if layer.down == "up_file")
    after = () if worst == "tuned" else commands.tune_commands(engine, facts, bad.name, shape, model)
    return Diagnosis(
        worst, verdict, engine, backend.name if backend else None, tuple(layers), by_severity(first + findings), after
    )


_KINDS: Final[Mapping[State, tuple[str, ...]]] = {
    "default": ("sglang_default", "vllm_default"),
    "fallback": ("sglang_fallback",),
    "up_file": ("sglang_down_reuses_up",),
}
_RANK: Final = ("default", "fallback", "down_reuses_up", "tuned")
_VERDICTS: Final = {
    "tuned": "In use and tuned: {engine} reads {names}.",
    "fallback": "Not tuned for this Triton version: {engine} reads a file of another one for {names}.",
    "down_reuses_up": "Half tuned: {engine} reads {names}, and runs the down projection with its configs.",
    "default": "Not tuned: {engine} found no file for {names} and runs its default config.",
}


def _states(layer: LayerState, engine: Engine) -> list[tuple[tuple[Role, ...], State]]:
    """The states of both projections; one where they are the same, and for vLLM, which has one file."""
    if engine == "vllm":
        return [(("up",), layer.up)]
    if layer.up == layer.down:
        return [(ROLES, layer.up)]
    return [(("up",), layer.up), (("down",), layer.down)]


def _layer_finding(facts: LogFacts, layer: LayerState, roles: tuple[Role, ...], state: State) -> Finding | None:
    kinds = _KINDS.get(state)
    if kinds is None:
        return None
    events = [e for e in facts.of(*kinds) if any(_about(e, role, layer) for role in roles)]
    shown = tuple(Evidence(e.text, e.line) for e in events[:4])
    times = sum(e.count for e in events)
    which = f"the {' and '.join(roles)} projection{'s' if len(roles) > 1 else ''}{_of(layer)}"
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
    if path is None or layer.name is None:
        return True
    name = path.rpartition("/")[2]
    wanted = str(layer.name.for_role(role))
    return name == wanted


def _of(layer: LayerState) -> str:
    name = layer.name
    return f" of E={name.num_experts}, N={name.intermediate_size}" if name is not None else ""


def asked_paths(facts: LogFacts) -> list[Path]:
    """The paths that the server asked for, in the order of the log."""
    return [Path(p) for e in facts.events for p in (e.values.get("asked") or e.values.get("path"),) if p]
