"""Work of a compile process.

It imports what the kernel needs and never touches a GPU: CUDA_VISIBLE_DEVICES is empty there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeopt.compile.binary import TensorCore, tensor_core
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Failure, Reason, Resources
from moeopt.kernels.base import MoEKernel

# Lines of a compiler's output that say what went wrong, in the order of how much they tell.
_TELLING = ("LLVM ERROR", "Assertion", "ptxas fatal", " error:", "fatal")
_LONGEST_REASON = 300
_WATCH_S = 0.5


@dataclass(frozen=True)
class Setup:
    """What a compile process is started with."""

    kernel: MoEKernel
    shape: MoEShape
    capability: tuple[int, int]
    parent_pid: int
    inspect: bool = False


@dataclass(frozen=True, slots=True)
class Binary:
    """What a compile process hands back.

    Attributes:
        resources: What the compiler said.
        tensor_core: The instruction used, or None where it was not looked for.
        files: Where Triton keeps it: path by name.
    """

    resources: Resources
    tensor_core: TensorCore | None = None
    files: Mapping[str, str] = field(default_factory=dict)


_setup: Setup | None = None
_targets = contextlib.ExitStack()


def start(setup: Setup) -> None:
    """Makes this process a compile worker; does nothing where it is one."""
    global _setup
    if _setup is not None:
        return
    os.setsid()  # so that a kill takes ptxas along, and Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_parent, args=(setup.parent_pid,), daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(5)
    # Triton imports torch when it first looks at a kernel's arguments: seconds that are not part of a compile.
    import torch  # noqa: F401

    from moeopt.kernels.target import cross_target

    _targets.enter_context(cross_target(setup.capability))
    _setup = setup


def compile_one(setup: Setup, role: Role, batch_size: int, config: LaunchConfig, log_path: str) -> Binary | Failure:
    """Compiles one config. All that the compiler prints goes to the log, which is removed on success."""
    start(setup)  # loky may have replaced a process that had grown too large
    path = Path(log_path)
    with _output_to(path):
        os.write(2, f"{os.getpid()} {config} {role} M={batch_size} sm_{''.join(map(str, setup.capability))}\n".encode())
        begin = time.monotonic()
        try:
            resources, files = _compiled(setup, role, batch_size, config)
            binary = Binary(resources, _tensor_core_of(files) if setup.inspect else None, files)
        except Exception as error:  # noqa: BLE001  (the border of the process: whatever the compiler raises is a value)
            text = f"{type(error).__name__}: {error}"
            # The machine's fault, not the compiler's: another run may do better.
            reason: Reason = "runtime" if isinstance(error, OSError | MemoryError) else "compile"
            os.write(2, f"\n{text}\nafter {time.monotonic() - begin:.1f} s\n".encode())
        else:
            path.unlink(missing_ok=True)
            return binary
    return Failure(reason, one_line(text, path), log_path)


def _compiled(setup: Setup, role: Role, batch_size: int, config: LaunchConfig) -> tuple[Resources, dict[str, str]]:
    """Compiles, and once more where what Triton's cache held of it was damaged."""
    with _triton_files() as (files, cached):
        try:
            return setup.kernel.compile(setup.shape, role, batch_size, config), files
        except Exception as error:
            damaged = cached or (_unreadable() if isinstance(error, ValueError) else set())
            if not damaged:
                raise
    for folder in damaged:
        os.write(2, f"removed what cannot be read from the cache: {folder}\n".encode())
        shutil.rmtree(folder, ignore_errors=True)
    with _triton_files() as (files, _):
        return setup.kernel.compile(setup.shape, role, batch_size, config), files


def _unreadable() -> set[Path]:
    """Entries of Triton's cache whose metadata are no JSON: a full disk and a power cut leave such."""
    import triton

    found = set()
    for path in Path(triton.knobs.cache.dir).glob("*/*.json"):
        try:
            json.loads(path.read_bytes())
        except (OSError, ValueError):
            found.add(path.parent)
    return found


def _is_elf(path: str | None) -> bool:
    if path is None:
        return False
    with Path(path).open("rb") as file:
        return file.read(4) == b"\x7fELF"


@contextlib.contextmanager
def _triton_files() -> Iterator[tuple[dict[str, str], set[Path]]]:
    """Collects the files of what is compiled inside, by name, and the folders of those that Triton had before."""
    import triton

    files: dict[str, str] = {}
    cached: set[Path] = set()

    def listen(*, metadata_group: Mapping[str, str], cache_hit: bool, **_: Any) -> None:
        files.update(metadata_group)
        if cache_hit:
            cached.update(Path(path).parent for path in metadata_group.values())
            # Said here, before Triton keeps the kernel in this process's memory.
            if not _is_elf(next((path for name, path in metadata_group.items() if name.endswith(".cubin")), None)):
                raise ValueError(f"Triton's cache holds no whole binary in {', '.join(map(str, cached))}")

    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listen
    try:
        yield files, cached
    finally:
        triton.knobs.compilation.listener = before


def _tensor_core_of(files: Mapping[str, str]) -> TensorCore | None:
    path = next((path for name, path in files.items() if name.endswith(".ptx")), None)
    return tensor_core(Path(path).read_text(encoding="utf-8")) if path else None


def pid_of(log_path: Path) -> int | None:
    """The process that a log was begun by, or None where it was not begun."""
    try:
        with log_path.open("rb") as file:
            return int(file.readline(64).split(b" ")[0])
    except (OSError, ValueError, IndexError):
        return None


def one_line(text: str, log_path: Path | None = None) -> str:
    """One line of reason, from an error's text and the log of what the compiler printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[0] if lines else "the compiler gave no reason"
    telling = _telling_line(log_path) if log_path else None
    if telling and telling not in reason:
        reason = f"{reason}: {telling}"
    return reason if len(reason) <= _LONGEST_REASON else reason[: _LONGEST_REASON - 1] + "…"


def _telling_line(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            head = file.read(1 << 20)
            file.seek(max(len(head), path.stat().st_size - (1 << 16)))
            text = (head + file.read()).decode(errors="replace")
    except OSError:
        return None
    # What faulthandler says of a signal is known already.
    lines = [line for line in text.splitlines()[1:] if not line.startswith("Fatal Python error")]
    for mark in _TELLING:
        for line in lines:
            at = line.find(mark)
            if at >= 0:
                return " ".join(line[at:].split())[:160]
    return None


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Sends file descriptors 1 and 2 of this process and its children to a file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    target = os.open(path, flags, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def _end_with_parent(parent_pid: int) -> None:
    """Ends this process and its children once the parent is gone."""
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)
