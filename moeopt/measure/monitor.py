"""The GPU's state as its driver reports it (NVML): clock, temperature, power, and who else is there."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

# Share of the GPU's time, in percent, from which another process counts as busy.
BUSY_PERCENT: Final = 5
_POLL_S: Final = 0.25
# The driver averages utilisation over up to a second.
_QUIET_POLLS: Final = 4


@dataclass(frozen=True, slots=True)
class GpuState:
    """One reading. None where the driver does not say.

    Attributes:
        clock_mhz: Clock of the multiprocessors.
        temperature_c: Of the chip.
        power_w: Drawn by the board.
    """

    clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None

    def to_dict(self) -> dict[str, float]:
        """JSON-ready; what is not known is left out."""
        values = {"clock_mhz": self.clock_mhz, "temperature_c": self.temperature_c, "power_w": self.power_w}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """Another process on the GPU.

    Attributes:
        pid: As the driver numbers it: in a container it may not be that of /proc.
        name: Of its program, or "".
        memory_bytes: GPU memory that it holds, or None.
    """

    pid: int
    name: str
    memory_bytes: int | None

    def __str__(self) -> str:
        held = f" with {self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else ""
        return f"{self.name or 'a process'} (pid {self.pid}){held}"


class GpuMonitor:
    """Reads one GPU's state.

    Args:
        nvml: The ``pynvml`` module, initialised.
        handle: NVML's handle of the GPU.
        sleep: For tests.
    """

    def __init__(self, nvml: Any, handle: Any, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._nvml = nvml
        self._handle = handle
        self._sleep = sleep
        self._before = {pid for pid, _ in self._processes()}
        self._own: set[int] = {os.getpid()}
        self._last_us = 0

    @classmethod
    def open(cls, index: int) -> GpuMonitor | None:
        """A monitor of torch's GPU ``index``, or None where there is no NVML."""
        nvml = load_nvml()
        if nvml is None:
            return None
        try:
            return cls(nvml, _handle(nvml, index))
        except nvml.NVMLError as error:
            log.info("NVML has no GPU for cuda:%d: %s", index, error)
            return None

    @property
    def name(self) -> str:
        """The GPU's name."""
        name = self._nvml.nvmlDeviceGetName(self._handle)
        return name.decode() if isinstance(name, bytes) else str(name)

    @property
    def driver(self) -> str:
        """The driver's version, or ""."""
        version = self._try(lambda _: self._nvml.nvmlSystemGetDriverVersion())
        return version.decode() if isinstance(version, bytes) else str(version or "")

    def uuid(self) -> str:
        """The GPU's UUID without its prefix, or ""."""
        value = self._try(self._nvml.nvmlDeviceGetUUID)
        text = value.decode() if isinstance(value, bytes) else str(value or "")
        return text.removeprefix("GPU-")

    def state(self) -> GpuState:
        """Clock, temperature and power now."""
        nvml = self._nvml
        milliwatts = self._try(nvml.nvmlDeviceGetPowerUsage)
        return GpuState(
            clock_mhz=self._try(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            temperature_c=self._try(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else round(milliwatts / 1000, 1),
        )

    def learn_own(self, pid: int) -> None:
        """Says that our worker with this pid has taken the GPU just now.

        In a container the driver may know it by another number: then the process that was not there
        before is it.
        """
        now = {found for found, _ in self._processes()}
        self._own |= {pid} if pid in now else now - self._before
        self._own.add(pid)

    def others(self) -> list[OtherProcess]:
        """All processes on the GPU but our own, the largest first."""
        found = [
            OtherProcess(pid, self._process_name(pid), memory)
            for pid, memory in self._processes()
            if pid not in self._own
        ]
        return sorted(found, key=lambda p: -(p.memory_bytes or 0))

    def busy(self) -> str | None:
        """Which other process used the GPU since the last call, in words, or None.

        Where the driver does not say how much each process uses the GPU, nobody counts as busy here;
        a control config still shows that timings drift.
        """
        others = {process.pid: process for process in self.others()}
        if not others:
            return None
        samples = self._try(self._nvml.nvmlDeviceGetProcessUtilization, self._last_us) or []
        self._last_us = max([self._last_us, *(int(s.timeStamp) for s in samples)])
        use: dict[int, int] = {}
        for sample in samples:
            if sample.pid in others:
                use[sample.pid] = max(use.get(sample.pid, 0), int(sample.smUtil))
        worst = max(use, key=lambda pid: use[pid], default=None)
        if worst is None or use[worst] < BUSY_PERCENT:
            return None
        return f"{others[worst]} used the GPU ({use[worst]} % of the time)"

    def wait_idle(self, timeout: float) -> str | None:
        """Waits until nobody else uses the GPU, while our own worker does nothing.

        Args:
            timeout: Most seconds.

        Returns:
            None, or who was still busy at the end.
        """
        end = time.monotonic() + timeout
        others = self.others()
        if not others:
            return None
        quiet = 0
        while True:
            use = self._try(self._nvml.nvmlDeviceGetUtilizationRates)
            percent = int(use.gpu) if use is not None else 0
            quiet = quiet + 1 if percent < BUSY_PERCENT else 0
            if use is None or quiet >= _QUIET_POLLS:
                return None
            if time.monotonic() >= end:
                return f"{others[0]} kept the GPU busy ({percent} % of the time)"
            self._sleep(_POLL_S)

    def _processes(self) -> list[tuple[int, int | None]]:
        nvml = self._nvml
        found: dict[int, int | None] = {}
        for query in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for process in self._try(query) or []:
                found[int(process.pid)] = process.usedGpuMemory
        return list(found.items())

    def _process_name(self, pid: int) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/comm").read_text().strip()
        name = self._try(lambda _: self._nvml.nvmlSystemGetProcessName(pid))
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name or "")
        return Path(text.split(" ")[0]).name

    def _try(self, query: Callable[..., Any], *args: Any) -> Any:
        try:
            return query(self._handle, *args)
        except self._nvml.NVMLError:
            return None


def load_nvml() -> Any | None:
    """The ``pynvml`` module with NVML initialised, or None where there is no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("NVML is not available: %s", error)
        return None
    return pynvml


def visible(nvml_count: int, environment: str | None) -> list[int | str]:
    """What CUDA_VISIBLE_DEVICES leaves, as NVML indices or UUIDs, in CUDA's order.

    Args:
        nvml_count: GPUs that NVML knows.
        environment: The variable's value, or None where it is not set.
    """
    if environment is None:
        return list(range(nvml_count))
    found: list[int | str] = []
    for part in environment.split(","):
        part = part.strip()
        if part.isdigit() and int(part) < nvml_count:
            found.append(int(part))
        elif part.startswith(("GPU-", "MIG-")):
            found.append(part)
        else:
            break  # CUDA ignores what follows an invalid entry
    return found


def gpu_count() -> int | None:
    """GPUs that CUDA would see, asked without starting CUDA; None where NVML cannot tell."""
    nvml = load_nvml()
    if nvml is None:
        return None
    return len(visible(nvml.nvmlDeviceGetCount(), _environment()))


def holders(processes: Iterable[OtherProcess]) -> list[str]:
    """Those that hold memory, in words."""
    return [str(process) for process in processes if process.memory_bytes]


def _environment() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _handle(nvml: Any, index: int) -> Any:
    entries = visible(nvml.nvmlDeviceGetCount(), _environment())
    # torch refuses an index that is not there, with a message that says so.
    entry = entries[index] if index < len(entries) else index
    if isinstance(entry, int):
        return nvml.nvmlDeviceGetHandleByIndex(entry)
    return nvml.nvmlDeviceGetHandleByUUID(entry)
