"""Verdicts on logs in which no config file is read: another kernel runs, or nothing says what does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moeopt.doctor import commands
from moeopt.doctor.backends import FLASHINFER, NVFP4, Backend, triton_option
from moeopt.doctor.diagnosis import Diagnosis, Evidence, Finding, LayerState, by_severity
from moeopt.doctor.scan import LogFacts
from moeopt.engines.names import Engine

TITLES: Final = {"sglang": "SGLang", "vllm": "vLLM"}


def no_config_line(
    facts: LogFacts,
    engine: Engine,
    backend: Backend | None,
    findings: list[Finding],
) -> Diagnosis:
    if backend is not None and backend.reads is False:
        return not_read(facts, engine, backend, [], findings)
    ready = facts.of("ready_sglang", "ready_vllm")
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
    option = triton_option(engine, facts.setting("quantization"))
    first = Finding("error", "no_config_line", message, settings(facts) + evidence(facts, "ready_sglang", "ready_vllm"))
    after = (commands.start_command(engine, facts, None, option or "--log-level info"),)
    return Diagnosis(
        "no_config_line",
        f"Unknown: {TITLES[engine]} logged no line about a MoE config file.",
        engine,
        backend.name if backend else None,
        (),
        by_severity([first, *findings]),
        after,
    )


def not_read(
    facts: LogFacts, engine: Engine, backend: Backend, layers: Sequence[LayerState], findings: list[Finding]
) -> Diagnosis:
    quantization = facts.setting("quantization")
    option = triton_option(engine, quantization)
    if engine == "vllm" and any(e.values.get("kind") == "NvFp4" for e in facts.of("vllm_backend")):
        option = None
    kernels = backend.name
    seen = (
        "no line about a config file is in the log"
        if not layers
        else "the default-config line in the log means nothing"
    )
    message = f"{backend.why}: {seen}, and no file that is written can change that."
    after: tuple[str, ...] = ()
    if option is not None:
        after = (commands.start_command(engine, facts, None, option),)
        message += f" To have the Triton kernel run, start with {option}; then measure whether it is faster here."
    elif engine == "sglang" and (kernels in FLASHINFER or quantization in NVFP4):
        done = facts.of("autotune_done")
        message += f" {quantization or 'These weights'} cannot run on the Triton kernel: tune {kernels} instead."
        if facts.is_on("disable_flashinfer_autotune"):
            message += " FlashInfer's own tuning is turned off (disable_flashinfer_autotune): leave that away."
        elif done:
            message += f" FlashInfer tuned itself at this start (line {done[0].line})."
        else:
            message += (
                " FlashInfer can tune its kernels when the server starts, and no line of this log says that it did. "
                "For GLM-5 on 8 RTX PRO 6000 tuning FlashInfer's CUTLASS path was seen to raise 880 to 3,740 tokens/s."
            )
        if not done:
            after = commands.flashinfer_commands(facts)
    else:
        message += " These weights cannot run on the Triton kernel."
    shown = settings(facts) + evidence(
        facts, "sglang_picked", "vllm_backend", "vllm_backend_for", "vllm_default", "autotune_begun", "autotune_done"
    )
    first = Finding("error", "not_read", message, shown)
    return Diagnosis(
        "not_read",
        f"Not in use: {TITLES[engine]} runs the experts with {kernels}, which reads no Triton config file.",
        engine,
        backend.name,
        tuple(layers),
        by_severity([first, *findings]),
        after,
    )


def deterministic(
    facts: LogFacts, engine: Engine, backend: Backend | None, layers: list[LayerState], findings: list[Finding]
) -> Diagnosis:
    first = Finding(
        "error",
        "deterministic",
        "Deterministic inference makes SGLang ignore every MoE config file, and run 64/64/32 at all batch sizes.",
        settings(facts, "enable_deterministic_inference") + evidence(facts, "sglang_deterministic"),
    )
    return Diagnosis(
        "deterministic",
        "Not in use: deterministic inference ignores MoE config files.",
        engine,
        backend.name if backend else None,
        tuple(layers),
        by_severity([first, *findings]),
        (commands.start_command(engine, facts, None) + ", without --enable-deterministic-inference",),
    )


def settings(facts: LogFacts, *keys: str) -> tuple[Evidence, ...]:
    wanted = keys or ("moe_runner_backend", "moe_backend", "backend_option", "quantization", "moe_a2a_backend")
    return tuple(
        Evidence(f"{key}={facts.settings[key][0]}", facts.settings[key][1])
        for key in wanted
        if facts.setting(key) not in (None, "none")
    )


def evidence(facts: LogFacts, *kinds: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(event.text, event.line) for event in facts.of(*kinds)[:4])
