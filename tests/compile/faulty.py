"""A kernel whose "compiler" fails in every way a real one was seen to, chosen by GROUP_SIZE_M."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Resources
from moeopt.kernels.base import MoEKernel

FAULTS = {
    "abort": 2,
    "segfault": 3,
    "hang": 4,
    "raise": 5,
    "exit": 6,
    "oom": 7,
    "oom_once": 8,
    "hang_in_child": 9,
    "print": 10,
    "unpicklable": 11,
    "disk_full": 12,
}
SOUND = 1


def config(fault: str | None = None, number: int = 0) -> LaunchConfig:
    """A config that fails this way; numbers tell configs apart."""
    return LaunchConfig(16, 32, 64, FAULTS[fault] if fault else SOUND, 4, 2, maxnreg=number)


class FaultyKernel(MoEKernel):
    """Compiles nothing. Every call leaves a line in ``<scratch>/calls``."""

    def __init__(self, scratch: Path, seconds: float = 0.0) -> None:
        self.scratch = scratch
        self.seconds = seconds

    @property
    def key(self) -> KernelKey:
        return KernelKey("faulty", "1", "0123456789abcdef")

    def check(self, shape: MoEShape, gpu: GpuSpec) -> None:
        pass

    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        return None

    def default_config(self, shape: MoEShape, role: Role, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
        return config()

    def specialisation(self, shape: MoEShape, role: Role, batch_size: int) -> str:
        return "one" if batch_size == 1 else "many"

    def compile(self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
        with (self.scratch / "calls").open("a") as calls:
            calls.write(f"{os.getpid()} {config} {role} {self.specialisation(shape, role, batch_size)}\n")
        time.sleep(self.seconds)
        fault = {number: name for name, number in FAULTS.items()}.get(config.group_size_m)
        if fault == "abort":
            os.write(2, b"LLVM ERROR: unsupported layout\n" + b"#map = affine_map<(d0) -> (d0)>\n" * 5000)
            os.abort()
        if fault == "segfault":
            ctypes.string_at(0)
        if fault == "hang":
            time.sleep(3600)
        if fault == "raise":
            sys.stdout.write("module { tt.func public @kernel }\n" * 100)
            os.write(2, b"kernel.py:1:1: error: no layout fits\n")
            raise RuntimeError("PassManager::run failed\nwith pages\nof MLIR")
        if fault == "exit":
            sys.exit(3)
        if fault == "oom" or (fault == "oom_once" and self._first(config)):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang_in_child":
            import subprocess

            child = subprocess.Popen(["sleep", "3600"])
            (self.scratch / "child").write_text(str(child.pid))
            child.wait()
        if fault == "print":
            sys.stdout.write("// PTX\n" * 10_000)
        if fault == "disk_full":
            raise OSError(28, "No space left on device")
        if fault == "unpicklable":
            return threading.Lock()  # type: ignore[return-value]
        return Resources(registers=32, spills=0, shared_bytes=1024, compile_s=0.05)

    def bind(self, *args: Any) -> Callable[[], None]:
        raise NotImplementedError("the compile pool's tests launch nothing")

    def space_extras(self, shape: MoEShape, gpu: GpuSpec) -> Sequence[str]:
        return ()

    def _first(self, config: LaunchConfig) -> bool:
        marker = self.scratch / f"seen-{config.maxnreg}"
        if marker.exists():
            return False
        marker.touch()
        return True


class OneProcessKernel(FaultyKernel):
    """There is memory for one process: the first that unpickles it lives, all others are killed."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        owner = self.scratch / "owner"
        try:
            with owner.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            if owner.read_text() != str(os.getpid()):
                os.kill(os.getpid(), signal.SIGKILL)
