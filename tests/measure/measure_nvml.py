"""A stand-in for the GPU's driver."""

# ruff: noqa: N802 (the names are those of NVML)

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    pass


class Nvml:
    """The part of pynvml that is used, for one GPU."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.processes: dict[int, int | None] = {}
        self.use: dict[int, int] = {}
        self.percent = [0]
        self.stamp = 0
        self.missing: set[str] = set()

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "missing"):

            def fail(*_):
                raise NVMLError("not supported")

            return fail
        return object.__getattribute__(self, name)

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200"

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetUUID(self, handle):
        return "GPU-abc"

    def nvmlDeviceGetPowerUsage(self, handle):
        return 312_345

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 41

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=p, usedGpuMemory=m) for p, m in self.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return []

    def nvmlSystemGetProcessName(self, pid):
        return b"/usr/bin/server --port 1"

    def nvmlDeviceGetProcessUtilization(self, handle, since):
        self.stamp += 1
        self.since = since
        return [SimpleNamespace(pid=p, smUtil=u, timeStamp=self.stamp) for p, u in self.use.items()]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=self.percent.pop(0) if len(self.percent) > 1 else self.percent[0])
