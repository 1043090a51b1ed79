"""What the driver says of a GPU, from a stand-in for the driver."""

from __future__ import annotations

import os

from moeopt.measure.monitor import GpuMonitor, visible
from tests.measure.measure_nvml import Nvml

SERVER, WORKER = 4_190_001, 4_190_002  # no such processes here


def test_state_and_names() -> None:
    nvml = Nvml()
    monitor = GpuMonitor(nvml, object())
    assert monitor.state().to_dict() == {"clock_mhz": 1980, "temperature_c": 41, "power_w": 312.3}
    assert (monitor.name, monitor.driver, monitor.uuid()) == ("NVIDIA H200", "580.1", "abc")
    nvml.missing = {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo", "nvmlSystemGetDriverVersion"}
    assert monitor.state().to_dict() == {"temperature_c": 41} and monitor.driver == ""


def test_others_are_named_and_we_are_not_among_them() -> None:
    nvml = Nvml()
    nvml.processes = {SERVER: 75 * 2**30, os.getpid(): 2**30}
    monitor = GpuMonitor(nvml, object())
    nvml.processes[WORKER] = 2**30
    monitor.learn_own(WORKER)
    (other,) = monitor.others()
    assert str(other) == f"server (pid {SERVER}) with 75.0 GiB"


def test_in_a_container_the_new_process_is_ours_whatever_its_number() -> None:
    nvml = Nvml()
    nvml.processes = {SERVER: None}
    monitor = GpuMonitor(nvml, object())
    nvml.processes[WORKER] = 2**30
    monitor.learn_own(17)
    assert [p.pid for p in monitor.others()] == [SERVER]


def test_who_is_busy() -> None:
    nvml = Nvml()
    nvml.processes = {SERVER: 2**30}
    monitor = GpuMonitor(nvml, object())
    nvml.processes[WORKER] = 2**30
    monitor.learn_own(WORKER)
    nvml.use = {SERVER: 1, WORKER: 99}
    assert monitor.busy() is None
    nvml.use = {SERVER: 37, WORKER: 60}
    busy = monitor.busy()
    assert busy is not None and "server" in busy and "37 %" in busy
    assert nvml.since == 1  # only what is newer than the last look
    nvml.missing = {"nvmlDeviceGetProcessUtilization"}
    assert monitor.busy() is None
    del nvml.processes[SERVER]
    assert monitor.busy() is None


def test_waiting_for_a_quiet_gpu() -> None:
    nvml = Nvml()
    slept: list[float] = []
    nvml.processes = {SERVER: 2**30}
    monitor = GpuMonitor(nvml, object(), sleep=slept.append)
    nvml.percent = [80, 50, 0, 60, 0]
    assert monitor.wait_idle(60.0) is None
    assert len(slept) >= 4 + 3
    nvml.percent = [80]
    told = monitor.wait_idle(0.0)
    assert told is not None and "server" in told and "80 %" in told
    nvml.processes = {}
    assert monitor.wait_idle(0.0) is None


def test_visible_devices() -> None:
    assert visible(4, None) == [0, 1, 2, 3]
    assert visible(4, "2,0") == [2, 0]
    assert visible(4, "GPU-abc,1") == ["GPU-abc", 1]
    assert visible(4, "1,9,0") == [1]
    assert visible(4, "") == [] and visible(4, "-1") == []
