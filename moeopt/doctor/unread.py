"""Verdicts on logs in which no config file is read: another kernel runs, or nothing says what does."""

from __future__ import annotations

from dataclasses import dataclass

from moeopt.doctor import commands
from moeopt.doctor.diagnosis import Diagnosis, Finding, LayerState, by_severity, lines_of
from moeopt.doctor.events import settings_of
from moeopt.engines import EngineSpec
from moeopt.engines.log import NVFP4, Backend, IgnoringMode, LogFacts


@dataclass(frozen=True)
class Case:
    """A log, and what is known of it before it is judged.

    Attributes:
        facts: What was read.
        spec: Whose log it is.
        backend: The MoE backend, or None where that is not known.
        layers: What the server does for each shape.
        findings: What else was found.
    """

    facts: LogFacts
    spec: EngineSpec
    backend: Backend | None
    layers: list[LayerState]
    findings: list[Finding]

    def answer(self, code: str, verdict: str, first: list[Finding], after: tuple[str, ...]) -> Diagnosis:
        """The diagnosis, with its own findings before those of the same severity."""
        backend = self.backend.name if self.backend is not None else None
        findings = by_severity([*first, *self.findings])
        return Diagnosis(code, verdict, self.spec.name, backend, tuple(self.layers), findings, after)


def no_config_line(case: Case) -> Diagnosis:
    """Nothing is said about a config file."""
    facts, spec, backend = case.facts, case.spec, case.backend
    if backend is not None and backend.reads is False:
        return not_read(case, backend)
    if facts.of("no_configs"):
        verdict = f"Not in use: {spec.title} does not find the directory of its config files."
        return case.answer("no_configs", verdict, [], ())
    level = (facts.setting("log_level") or "info").lower()
    known = backend.why if backend is not None else "the log does not say which MoE backend runs"
    if not facts.of("ready"):
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
    shown = settings_of(facts, *spec.log.shown) + lines_of(facts.of("ready"))
    first = Finding("error", "no_config_line", message, shown)
    verdict = f"Unknown: {spec.title} logged no line about a MoE config file."
    option = spec.log.triton_option(facts) or "--log-level info"
    return case.answer("no_config_line", verdict, [first], (commands.start_command(spec, facts, None, option),))


def not_read(case: Case, backend: Backend) -> Diagnosis:
    """Another kernel runs, which reads no file."""
    facts, spec = case.facts, case.spec
    option, tuning = spec.log.triton_option(facts), spec.log.flashinfer
    weights = facts.setting("quantization") or "These weights"
    seen = (
        "the default-config line in the log means nothing"
        if case.layers
        else "no line about a config file is in the log"
    )
    message = f"{backend.why}: {seen}, and no file that is written can change that."
    after: tuple[str, ...] = ()
    if option is not None:
        after = (commands.start_command(spec, facts, None, option),)
        message += f" To have the Triton kernel run, start with {option}; then measure whether it is faster here."
    elif tuning is not None and (backend.name in tuning.backends or weights in NVFP4):
        done = facts.of("autotune_done")
        message += f" {weights} cannot run on the Triton kernel: tune {backend.name} instead."
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
            after = commands.flashinfer_commands(spec, facts, tuning)
    else:
        message += " These weights cannot run on the Triton kernel."
    shown = settings_of(facts, *spec.log.shown)
    shown += lines_of(facts.of("backend", "marlin", "ct_marlin", "default", "autotune_begun", "autotune_done"))
    verdict = f"Not in use: {spec.title} runs the experts with {backend.name}, which reads no Triton config file."
    return case.answer("not_read", verdict, [Finding("error", "not_read", message, shown)], after)


def ignored(case: Case, mode: IgnoringMode) -> Diagnosis:
    """The server is in a mode that ignores all files."""
    shown = settings_of(case.facts, mode.setting) + lines_of(case.facts.of("ignored"))
    first = Finding("error", mode.code, mode.message, shown)
    verdict = f"Not in use: {mode.title} ignores MoE config files."
    start = commands.start_command(case.spec, case.facts, None, without=commands.option_of(mode.setting))
    return case.answer(mode.code, verdict, [first], (start,))
