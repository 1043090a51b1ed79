"""Verdicts on logs in which no config file is read: another kernel runs, or nothing says what does."""

from __future__ import annotations

from collections.abc import Sequence

from moeopt.doctor import commands
from moeopt.doctor.diagnosis import Diagnosis, Evidence, Finding, LayerState, by_severity
from moeopt.engines import EngineSpec
from moeopt.engines.log import NVFP4, Backend, IgnoringMode, LogFacts


def no_config_line(
    facts: LogFacts,
    spec: EngineSpec,
    backend: Backend | None,
    findings: list[Finding],
) -> Diagnosis:
    if backend is not None and backend.reads is False:
        return not_read(facts, spec, backend, [], findings)
    ready = facts.of("ready")
    level = (facts.setting("log_level") or "info").lower()
    known = backend.why if backend is not None else "the log does not say which MoE backend runs"
    if not ready:
        message = (
            f"No line about a MoE config file, and none that says that the server is ready: {known}. The kernel looks "
            "for its file when it first runs, so the log may end too early: give it until the server is ready."
        )
    elif level not in ("info", "debug"):
        message = (
            f"No line about a MoE config file at log level {level}, at which the line for a file that was found is not "
            f"written: {known}. Start the server with log level info."
        )
    else:
        message = (
            f"No line about a MoE config file in {facts.lines:,} lines, though the server is ready: the Triton kernel "
            f"did not look for one ({known}). Either another kernel runs the experts, or the model has none."
        )
    option = spec.log.triton_option(facts) or "--log-level info"
    shown = settings(facts, *spec.log.shown) + evidence(facts, "ready")
    first = Finding("error", "no_config_line", message, shown)
    return Diagnosis(
        "no_config_line",
        f"Unknown: {spec.title} logged no line about a MoE config file.",
        spec.name,
        backend.name if backend else None,
        (),
        by_severity([first, *findings]),
        (commands.start_command(spec, facts, None, option),),
    )


def not_read(
    facts: LogFacts, spec: EngineSpec, backend: Backend, layers: Sequence[LayerState], findings: list[Finding]
) -> Diagnosis:
    quantization = facts.setting("quantization")
    option, tuning, kernels = spec.log.triton_option(facts), spec.log.flashinfer, backend.name
    seen = (
        "no line about a config file is in the log"
        if not layers
        else "the default-config line in the log means nothing"
    )
    message = f"{backend.why}: {seen}, and no file that is written can change that."
    after: tuple[str, ...] = ()
    if option is not None:
        after = (commands.start_command(spec, facts, None, option),)
        message += f" To have the Triton kernel run, start with {option}; then measure whether it is faster here."
    elif tuning is not None and (kernels in tuning.backends or quantization in NVFP4):
        done = facts.of("autotune_done")
        message += f" {quantization or 'These weights'} cannot run on the Triton kernel: tune {kernels} instead."
        if facts.is_on(tuning.off):
            message += f" FlashInfer's own tuning is turned off ({tuning.off}): omit that."
        elif done:
            message += f" FlashInfer tuned itself at this start (line {done[0].line})."
        else:
            message += (
                " FlashInfer can tune its kernels when the server starts, and no line of this log says that it did. "
                "For GLM-5 on 8 RTX PRO 6000 tuning FlashInfer's CUTLASS path was seen to raise 880 to 3,740 tokens/s."
            )
        if not done:
            picked = facts.setting("moe_runner_backend", "backend_option") or ""
            after = commands.flashinfer_commands(spec, facts, tuning, picked)
    else:
        message += " These weights cannot run on the Triton kernel."
    shown = settings(facts, *spec.log.shown)
    shown += evidence(facts, "backend", "default", "autotune_begun", "autotune_done")
    first = Finding("error", "not_read", message, shown)
    return Diagnosis(
        "not_read",
        f"Not in use: {spec.title} runs the experts with {kernels}, which reads no Triton config file.",
        spec.name,
        backend.name,
        tuple(layers),
        by_severity([first, *findings]),
        after,
    )


def ignored(
    facts: LogFacts,
    spec: EngineSpec,
    mode: IgnoringMode,
    backend: Backend | None,
    layers: list[LayerState],
    findings: list[Finding],
) -> Diagnosis:
    shown = settings(facts, mode.setting) + evidence(facts, "ignored")
    first = Finding("error", mode.code, mode.message, shown)
    return Diagnosis(
        mode.code,
        f"Not in use: {mode.title} ignores MoE config files.",
        spec.name,
        backend.name if backend else None,
        tuple(layers),
        by_severity([first, *findings]),
        (commands.start_command(spec, facts, None, without=commands.option_of(mode.setting)),),
    )


def settings(facts: LogFacts, *keys: str) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(f"{key}={facts.settings[key][0]}", facts.settings[key][1])
        for key in keys
        if facts.setting(key) not in (None, "none")
    )


def evidence(facts: LogFacts, *kinds: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(event.text, event.line) for event in facts.of(*kinds)[:4])
