"""Compiling for a GPU that is not there, and what the compiler says of a binary."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from moeopt.core.trial import Resources

# Triton keeps one in-process cache per device index: these indices are not a real device's.
_FIRST_INDEX: Final = 1 << 20


class _NoDevice:
    """A Triton driver without a GPU: it names the target, and can launch nothing.

    The parts of Triton's driver interface that compiling asks for (Triton 3.5 to 3.9).
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._sm = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._sm, 32)

    def get_current_device(self) -> int:
        return _FIRST_INDEX + self._sm

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def cross_target(capability: tuple[int, int]) -> Iterator[None]:
    """Makes Triton compile for this compute capability, whether a GPU is present or not.

    Inside, ``kernel.warmup(torch.bfloat16, ..., grid=(1,), **constants)`` goes through the very
    specialisation and disk-cache key of a launch on such a GPU, so a later launch there finds the
    binary in Triton's cache. Launching inside fails.

    Args:
        capability: Such as (12, 0).
    """
    before = driver._active
    driver.set_active(_NoDevice(capability))
    try:
        yield
    finally:
        driver._active = before


def current_capability() -> tuple[int, int]:
    """Compute capability that Triton compiles for now."""
    sm = int(driver.active.get_current_target().arch)
    return sm // 10, sm % 10


def compile_resources(warmup: Callable[[], Any]) -> Resources:
    """Runs a warmup and says what the binary needs.

    Args:
        warmup: Calls ``JITFunction.warmup`` and returns its compiled kernel.

    Returns:
        Registers and local memory from the binary, shared memory from Triton's metadata; the seconds
        are 0 where the binary came from Triton's cache.
    """
    compiled = False

    before = triton.knobs.compilation.listener

    def listen(*, cache_hit: bool, **rest: Any) -> None:
        nonlocal compiled
        compiled = compiled or not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **rest)

    triton.knobs.compilation.listener = listen
    started = time.perf_counter()
    try:
        kernel = warmup()
        seconds = time.perf_counter() - started
    finally:
        triton.knobs.compilation.listener = before
    registers, local = binary_resources(kernel.asm["cubin"])
    return Resources(registers, local, int(kernel.metadata.shared), seconds if compiled else 0.0)


def binary_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread, as ``cuobjdump`` reads them from the binary."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {' '.join(text.split())[:200]!r}")
    return int(found[1]), int(found[2])
