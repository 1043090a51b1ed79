"""``moeopt`` alone: what is here, and the command that comes next."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from moeopt import __version__, engines
from moeopt.measure.monitor import GpuMonitor, gpu_count, holders
from moeopt.recordings.shipped import shipped_recordings
from moeopt.storage.peek import peek
from moeopt.tuning.options import DEFAULT_STORAGE

_SHOWN: Final = 4  # databases


def overview() -> str:
    """Lines on GPUs, engines, versions and databases here, and what to run."""
    gpus, engine_names = _gpus(), [name for name in engines.names() if _version(name)]
    found = sorted([*Path().glob("*.db"), *Path().glob("studies/*.db")])
    databases = {str(path): line for path in found if (line := _database(path))}
    here = [f"{path}: {line}" for path, line in databases.items()][:_SHOWN]
    lines = [f"moeopt {__version__}: launch configs of the Triton fused MoE kernel, for SGLang and vLLM", ""]
    for title, said in (
        ("GPU", gpus or ["none: the driver shows no CUDA GPU here"]),
        ("engine", [f"{engines.get(name).title} {_version(name)}" for name in engine_names] or ["none installed here"]),
        ("with", [", ".join(f"{name} {_version(name) or 'not installed'}" for name in ("triton", "torch"))]),
        (
            "database",
            here or ["none here: a tune makes studies/moeopt.db"],
        ),
    ):
        lines += [f"{title if number == 0 else '':9} {line}" for number, line in enumerate(said)]
    lines += ["", "next:"]
    lines += [f"    {command:70} # {why}" for command, why in _next(bool(gpus), engine_names, list(databases))]
    return "\n".join(lines)


def _next(gpu: bool, names: list[str], databases: list[str]) -> list[tuple[str, str]]:
    name = names[0] if names else engines.DEFAULT
    joint = "" if engines.get(name).split else " --mode joint"
    out = []
    if gpu:
        command = f"moeopt tune --model DIR --tp N --engine {name}{joint} --export {name}:moe-configs"
        out.append((command, "DIR holds config.json"))
    else:
        recording = next(iter(sorted(shipped_recordings(), key=lambda one: "K3072-N256-bf16.j" not in one)))
        out.append((f"moeopt tune --gpu recorded:{recording}", "replays a GPU"))
        out.append(('moeopt plan --model DIR --tp N --gpu "NVIDIA H200"', "what a tune there would take"))
    if databases:
        usual = DEFAULT_STORAGE.removeprefix("sqlite:///")
        storage = "" if usual in databases else f" --storage {databases[0]}"
        out.append((f"moeopt status{storage}", "what was found so far"))
    out.append(("moeopt doctor --log server.log", "does a server read its file?"))
    out.append(("moeopt --help", "all commands"))
    return out


def _gpus() -> list[str]:
    found: Counter[str] = Counter()
    taken = []
    for index in range(gpu_count() or 0):
        monitor = GpuMonitor.open(index)
        if monitor is not None:
            found[f"{monitor.name}, driver {monitor.driver or '?'}"] += 1
            taken += [f"cuda:{index} is in use by {holder}" for holder in holders(monitor.others())[:1]]
    return [f"{count} x {name}" if count > 1 else name for name, count in found.items()] + taken


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _database(path: Path) -> str:
    """One line on a study database; empty for a file that is none of ours."""
    seen = peek(path)
    if seen is None:
        return ""
    more = f" and {len(seen.titles) - 1} more" if len(seen.titles) > 1 else ""
    runs = f", {seen.open_runs} {'run' if seen.open_runs == 1 else 'runs'} not finished" if seen.open_runs else ""
    return f"{seen.titles[0]}{more}: {seen.trials} trials{runs}"
