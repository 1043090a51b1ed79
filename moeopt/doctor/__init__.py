"""Doctor: is the tuned file read at all, and if not, why, from a server log, a config directory, or both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moeopt import engines
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.doctor.diagnosis import Diagnosis, Evidence, Finding, LayerState, by_severity
from moeopt.doctor.directory import check_directory, judge_directory, lookup_findings
from moeopt.doctor.flashinfer import judge_caches
from moeopt.doctor.scan import scan_log
from moeopt.doctor.verdict import asked_paths, engine_of, judge_log
from moeopt.engines.log import LogFacts
from moeopt.errors import InvalidInputError, UnknownGpuError
from moeopt.export.lookup import config_root, find_config_files
from moeopt.export.names import full_gpu_name
from moeopt.models.request import ModelRequest

__all__ = [
    "Diagnosis",
    "Evidence",
    "Finding",
    "LayerState",
    "LogFacts",
    "diagnose",
    "engine_of",
    "judge_caches",
    "scan_log",
]


def diagnose(
    log: str | Path | LogFacts | None = None,
    config_dir: str | Path | None = None,
    *,
    engine: str | None = None,
    shape: MoEShape | None = None,
    gpu_name: str | None = None,
    triton_version: str | None = None,
    request: ModelRequest | None = None,
) -> Diagnosis:
    """Looks at a server log, a directory of config files, or both.

    Args:
        log: A server's output, or what :func:`scan_log` read of it; ``-`` is standard input.
        config_dir: A directory with config files.
        engine: Its name; None finds out.
        shape: The layer as one GPU sees it.
        gpu_name: The server's GPU as torch reports it.
        triton_version: Of the server.
        request: The model and its layout, as they were given, for the commands to run next.

    Raises:
        InvalidInputError: Neither was given, or one cannot be read.
    """
    if log is None and config_dir is None:
        raise InvalidInputError("nothing to look at: give --log, --config-dir, or both")
    gpu_name = full_gpu_name(gpu_name) if gpu_name else None
    gpu = _spec(gpu_name)
    if log is None:
        return judge_directory(
            config_dir or "",
            engine=engine,
            shape=shape,
            gpu=gpu,
            gpu_name=gpu_name,
            triton_version=triton_version,
            request=request,
        )
    facts = log if isinstance(log, LogFacts) else scan_log(log)
    answer = judge_log(facts, engine=engine, gpu=gpu, shape=shape, request=request)
    if config_dir is None or answer.engine is None:
        return answer
    extra = [*check_directory(config_dir, answer.engine, gpu), *_beside(facts, answer, config_dir, triton_version)]
    return replace(answer, findings=by_severity([*answer.findings, *extra]))


def _beside(facts: LogFacts, answer: Diagnosis, config_dir: str | Path, triton_version: str | None) -> list[Finding]:
    """What the directory has for the layers that the server asked for."""
    if answer.engine is None:
        return []
    spec = engines.get(answer.engine)
    root = config_root(answer.engine, config_dir)
    findings = []
    asked = asked_paths(facts)
    looked = {config_root(answer.engine, path.parent) for path in asked}
    if asked and root.absolute() not in {path.absolute() for path in looked} and root.resolve() not in looked:
        message = (
            f"The server looked in {', '.join(sorted(map(str, looked)))}, not in {root}: start it with "
            f"{spec.variable}={root}."
        )
        findings.append(Finding("warning", "other_directory", message))
    for layer in answer.layers:
        if layer.name is None:
            continue
        version = triton_version
        if version is None and layer.up_path is not None:
            numbers = spec.layout.version_of(layer.up_path.parent.name)
            version = ".".join(map(str, numbers)) if numbers else None
        if version is None and spec.layout.versioned:
            continue
        lookup = find_config_files(answer.engine, root, layer.name, version or "0")
        if lookup.tuned:
            message = f"{root} has the file for {layer.name}: restart the server to have it read."
            findings.append(Finding("note", "file_there", message))
        else:
            findings += lookup_findings(lookup)
    return findings


def _spec(gpu_name: str | None) -> GpuSpec | None:
    try:
        return GpuSpec.by_name(gpu_name) if gpu_name else None
    except UnknownGpuError:
        return None
