"""FlashInfer's own tuning: its lines in a server log, and its cache files; nothing of it is changed.

A cache is one JSON file for each rank (``_metadata`` and an entry for each operation and bucket of
batch sizes), or since FlashInfer 0.7 a managed store (``v2/HASH/manifest.json`` and ``entries/``). A file
is taken whole or not at all: each field of the metadata must be as the server has it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moeopt.doctor.diagnosis import Diagnosis, Evidence, Finding, by_severity, lines_of
from moeopt.engines.log import Event, LogFacts
from moeopt.errors import InvalidInputError

_TIME: Final = re.compile(r"\b(\d{2}):(\d{2}):(\d{2})\b")
_DAY: Final = 24 * 3600
_RESERVED: Final = ("_metadata", "_records", "_generation")
_GIVE: Final = "give a FlashInfer autotune cache file, or a directory with such files or a v2 store"


@dataclass(frozen=True)
class TacticCache:
    """One cache: a file of a rank, or one environment of a managed store.

    Attributes:
        path: The file, or the directory of the environment.
        version: 1 or 2, of the format.
        metadata: For which versions and GPU it was tuned.
        tactics: Key of an operation -> (runner, tactic as JSON).
    """

    path: Path
    version: int
    metadata: Mapping[str, str]
    tactics: Mapping[str, tuple[str, str]]

    @property
    def operations(self) -> Counter[str]:
        """How many keys each operation has."""
        return Counter(_operation(key) for key in self.tactics)


def flashinfer_findings(facts: LogFacts) -> list[Finding]:
    """What a log says of FlashInfer's tuning: how long it took, what came from the cache, what was thrown away."""
    findings = []
    begun, done = facts.of("autotune_begun"), facts.of("autotune_done")
    if begun:
        took = _seconds(begun[0], done[0]) if done else None
        said = f" and took {took} s" if took is not None else "" if done else ", and no line says that it ended"
        message = f"FlashInfer tuned its kernels at this start{said}."
        findings.append(Finding("note", "autotune", message, lines_of([*begun[:1], *done[:1]])))
    if disagree := facts.of("autotune_disagree"):
        message = (
            "The ranks' FlashInfer caches differ, so SGLang deletes them and tunes again: with tensor parallelism it "
            "does so at every start, as each rank's keys name the rank."
        )
        findings.append(Finding("warning", "autotune_disagree", message, lines_of(disagree)))
    for event in facts.of("autotune_mismatch")[:2]:
        message = (
            f"FlashInfer does not take its cache {event.values['path']}, which is of another environment "
            f"({event.values['what']}): everything in it is tuned again."
        )
        findings.append(Finding("warning", "autotune_mismatch", message, lines_of([event])))
    for event in facts.of("autotune_loaded")[:2]:
        message = f"FlashInfer took {event.values['count']} tactics from {event.values['path']}."
        findings.append(Finding("note", "autotune_loaded", message, lines_of([event])))
    if off := facts.of("autotune_off"):
        findings.append(Finding("note", "autotune_off", "FlashInfer's own tuning is turned off.", lines_of(off)))
    return findings


def _seconds(begun: Event, done: Event) -> int | None:
    """Seconds between two lines that have a time of day."""
    times = [_TIME.search(event.text) for event in (begun, done)]
    if not all(times):
        return None
    first, last = (sum(int(t) * f for t, f in zip(m.groups(), (3600, 60, 1), strict=True)) for m in times if m)
    return (last - first) % _DAY


def read_caches(path: str | Path) -> list[TacticCache]:
    """The caches of a file or a directory.

    Raises:
        InvalidInputError: There is none, or one cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise InvalidInputError(f"{path}: no such file or directory; {_GIVE}")
    if path.is_file():
        return [_file(path, _json(path))]
    stores = sorted(manifest.parent for manifest in path.rglob("manifest.json"))
    inside = {entry for store in stores for entry in store.rglob("*.json")}
    found = [_store(store) for store in stores]
    for file in sorted(file for file in path.rglob("*.json") if file not in inside):
        data = _json(file)
        if isinstance(data, dict) and ("_metadata" in data or all(_is_entry(v) for v in data.values())):
            found.append(_file(file, data))
    if not found:
        raise InvalidInputError(f"{path} holds no FlashInfer cache; {_GIVE}")
    return found


def judge_caches(path: str | Path, gpu_name: str | None = None) -> Diagnosis:
    """What the caches hold, for which environment, which ranks differ, and whether a server here would take them.

    Args:
        path: A cache file, or a directory.
        gpu_name: The server's GPU as torch reports it, or None.

    Raises:
        InvalidInputError: As :func:`read_caches`.
    """
    caches = read_caches(path)
    findings: list[Finding] = []
    for cache in caches:
        what = ", ".join(f"{count} of {name}" for name, count in sorted(cache.operations.items()))
        of = ", ".join(f"{key} {value}" for key, value in sorted(cache.metadata.items())) or "no metadata"
        kind = "file" if cache.version == 1 else "managed store (v2)"
        message = f"{kind} with {len(cache.tactics)} tactics ({what or 'none'}); tuned with {of}."
        findings.append(Finding("note", "cache", message, (Evidence(str(cache.path)),)))
        findings += _environment(cache, gpu_name)
    findings += _ranks([cache for cache in caches if cache.version == 1])
    bad = [f for f in findings if f.severity != "note"]
    count = f"{len(caches)} FlashInfer cache{'s' if len(caches) > 1 else ''} in {path}"
    verdict = f"{count}: {len(bad)} would not be taken, or not for long." if bad else f"{count}: nothing stands out."
    return Diagnosis("flashinfer_problems" if bad else "flashinfer", verdict, None, None, (), by_severity(findings))


def _environment(cache: TacticCache, gpu_name: str | None) -> Iterator[Finding]:
    there = {"gpu": gpu_name, "flashinfer_version": _installed("flashinfer-python")}
    for key, here in there.items():
        saved = cache.metadata.get(key)
        if here is not None and saved not in (None, "*", "unknown") and saved != here:
            message = f"A server with {key} {here} does not take it: it was tuned with {key} {saved}."
            yield Finding("warning", "environment", message, (Evidence(str(cache.path)),))
    unknown = sorted(key for key, value in cache.metadata.items() if value in ("unknown", "None", ""))
    if unknown:
        message = f"{', '.join(unknown)} could not be told when it was written: it is not taken, and replaced."
        yield Finding("warning", "unknown", message, (Evidence(str(cache.path)),))


def _ranks(caches: list[TacticCache]) -> Iterator[Finding]:
    """Where the files of one directory differ: SGLang keeps them only if all ranks' are the same, byte by byte."""
    for folder in sorted({cache.path.parent for cache in caches}):
        ranks = [cache for cache in caches if cache.path.parent == folder]
        if len(ranks) < 2 or all(cache.tactics == ranks[0].tactics for cache in ranks):
            continue
        shared = set(ranks[0].tactics).intersection(*(cache.tactics for cache in ranks[1:]))
        differ = sum(len({cache.tactics[key] for cache in ranks}) > 1 for key in shared)
        only = sum(len(set(cache.tactics) - shared) for cache in ranks)
        message = (
            f"The files of {len(ranks)} ranks differ: {differ} of {len(shared)} shared keys have other tactics, and "
            f"{only} keys are in some files only. SGLang throws all of them away at the next start and tunes again."
        )
        yield Finding("warning", "ranks_differ", message, tuple(Evidence(str(cache.path)) for cache in ranks[:4]))


def _file(path: Path, data: Any) -> TacticCache:
    if not isinstance(data, dict):
        raise InvalidInputError(f"{path} is no FlashInfer cache: a JSON object is expected; {_GIVE}")
    entries = {key: value for key, value in data.items() if key not in _RESERVED}
    if "_metadata" not in data and not (entries and all(_is_entry(value) for value in entries.values())):
        raise InvalidInputError(f"{path} is no FlashInfer cache: it has no _metadata and no tactics; {_GIVE}")
    tactics = {key: (value[0], json.dumps(value[1])) for key, value in entries.items() if _is_entry(value)}
    return TacticCache(path, 1, _words(data.get("_metadata")), tactics)


def _store(path: Path) -> TacticCache:
    tactics = {}
    for file in sorted((path / "entries").glob("*.json")):
        entry = _json(file)
        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            tactics[entry["key"]] = (str(entry.get("runner")), json.dumps(entry.get("tactic")))
    return TacticCache(path, 2, _words(_json(path / "manifest.json")), tactics)


def _is_entry(value: object) -> bool:
    return isinstance(value, list) and len(value) >= 2 and isinstance(value[0], str)


def _words(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _operation(key: str) -> str:
    """The operation of a key, which is a tuple written by Python."""
    try:
        return str(ast.literal_eval(key)[0])
    except (ValueError, SyntaxError, TypeError, IndexError, MemoryError, RecursionError):
        return key.strip("('\"").partition("'")[0] or "?"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} cannot be read as JSON ({error}); {_GIVE}") from None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
