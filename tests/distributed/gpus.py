"""What stands for GPUs in the executor tests: recordings, replayed here or in a real worker process."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import KernelKey, Provenance
from moeopt.core.shape import MoEShape, Role
from moeopt.core.trial import Job, Measurement, Race, Resources, never_stop
from moeopt.errors import DeviceError
from moeopt.kernels.base import MoEKernel
from moeopt.measure.base import Device, DeviceSpec
from moeopt.measure.compile_queue import Compiler
from moeopt.measure.supervisor import Deadlines, Supervisor
from moeopt.measure.worker_device import WorkerDevice
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.testing.faults import Fault, FaultyBench

CONTROL = LaunchConfig(16, 32, 64, 1, 4, 3)
QUICK = Deadlines(start=60.0, prepare=20.0, first_check=1.0, floor=1.0, factor=20.0)


def numbered(directory: Path) -> int:
    """0, 1, ...: each once, whichever process asks."""
    for number in itertools.count():
        try:
            os.close(os.open(directory / f"gpu{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number
    raise AssertionError


class ReplayedGpu(RecordedDevice):
    """Replays in this process; says which GPU it is, and writes down every round."""

    def __init__(self, recording: Recording, number: int, log: Path, control: float | None, pause_s: float) -> None:
        super().__init__(recording)
        self.number = number
        self.control = control
        self.pause_s = pause_s
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def control_us(self) -> float | None:
        return self.control

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        def counted(job: Job, rounds: Sequence[float]) -> bool:
            os.write(self._log, f"{self.number} {job.cell.role} {job.cell.batch_size} {job.config}\n".encode())
            return race(job, rounds)

        for measurement in super().measure(jobs, counted):
            time.sleep(self.pause_s)
            yield replace(measurement, extra={"gpu": self.number})


@dataclass(frozen=True)
class Replayed:
    """Opens a :class:`ReplayedGpu`; pickled and sent to wherever that is.

    Attributes:
        recording: What it replays.
        directory: Where the GPUs are numbered and their logs are.
        control: Time of the control config, per GPU.
        other: GPU with this number is of another kind.
        refuse: GPU with this number fails at its first job.
        pause_s: Seconds that each job takes.
    """

    recording: Recording
    directory: Path
    control: tuple[float | None, ...] = (100.0, 101.0)
    other: int | None = None
    refuse: int | None = None
    pause_s: float = 0.0

    def __call__(self) -> Device:
        number = numbered(self.directory)
        kind = RefusingGpu if number == self.refuse else ReplayedGpu
        control = self.control[number % len(self.control)]
        device = kind(self.recording, number, self.directory / "rounds", control, self.pause_s)
        if number == self.other:
            device.spec = replace(device.spec, gpu=GpuSpec.by_name("NVIDIA B200"))
        return device

    def rounds(self) -> list[str]:
        """Every round that was timed, as ``GPU ROLE M CONFIG``."""
        return (self.directory / "rounds").read_text().splitlines()


class RefusingGpu(ReplayedGpu):
    """Fails at its first job."""

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        raise DeviceError("the driver is gone")
        yield


@dataclass(frozen=True)
class RecordedKernel(MoEKernel):
    """Compiles nothing: says what the recording says, or dies. Each compile leaves a line in ``compiles``.

    Attributes:
        path: The recording.
        directory: Where ``compiles`` is.
        aborts: Configs whose compiler aborts.
        compile_s: Seconds that a compile takes.
    """

    path: Path
    directory: Path
    aborts: frozenset[LaunchConfig] = frozenset()
    compile_s: float = 0.0

    @cached_property
    def _recording(self) -> Recording:
        return Recording.load(self.path)

    @property
    def key(self) -> KernelKey:
        return KernelKey("builtin", "1", "0123456789abcdef")

    def check(self, shape: MoEShape, gpu: GpuSpec) -> None:
        pass

    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        row = self._recording.rows.get(config)
        return "shared memory" if row is None or row.status == "out_of_resources" else None

    def default_config(self, shape: MoEShape, role: Role, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
        return CONTROL

    def specialisation(self, shape: MoEShape, role: Role, batch_size: int) -> str:
        return "any"

    def compile(self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
        with (self.directory / "compiles").open("a") as file:
            file.write(f"{role} {config}\n")
        time.sleep(self.compile_s)
        if config in self.aborts:
            os.write(2, b"LLVM ERROR: unsupported layout\n")
            os.kill(os.getpid(), signal.SIGABRT)
        row = self._recording.rows[config]
        if row.status != "ok":
            raise RuntimeError(row.error)
        return row.resources(role)

    def bind(self, *args: Any) -> Callable[[], None]:
        raise DeviceError("a recording is not launched")

    def space_extras(self, shape: MoEShape, gpu: GpuSpec) -> Sequence[str]:
        return ()


class WorkedGpu(WorkerDevice):
    """A GPU whose worker process replays, and can be killed."""

    def __init__(self, *, log: Path, **parts: Any) -> None:
        self._log = log
        super().__init__(**parts)

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            new = self._log.with_suffix(".new")
            new.write_text(str(self._supervisor.pid))
            new.replace(self._log)
            yield measurement


@dataclass(frozen=True)
class Worked:
    """Opens a :class:`WorkedGpu`; pickled and sent to wherever that is.

    Attributes:
        kernel: What is "compiled".
        make_compiler: Opens the compiler, beside the GPU.
        faults: What launching a config does.
        round_s: Seconds that each round takes.
    """

    kernel: RecordedKernel
    make_compiler: Callable[[MoEKernel, MoEShape, GpuSpec], Compiler]
    faults: dict[LaunchConfig, Fault] = field(default_factory=dict)
    round_s: float = 0.0

    def __call__(self) -> Device:
        recording = Recording.load(self.kernel.path)
        directory = self.kernel.directory
        number = numbered(directory)
        bench = FaultyBench(self.kernel.path, self.faults, round_s=self.round_s)
        return WorkedGpu(
            log=directory / f"worker{number}",
            spec=DeviceSpec.of_kernel(
                self.kernel,
                recording.shape,
                recording.gpu,
                Provenance("a worker", "builtin", "0", "0123456789abcdef", "3.6.0", "2.11.0", recorded=True),
            ),
            kernel=self.kernel,
            supervisor=Supervisor(bench, directory / f"gpu{number}.log", deadlines=QUICK),
            compiler=self.make_compiler(self.kernel, recording.shape, recording.gpu),
            batch_sizes=(1,),
        )

    def compiles(self) -> list[str]:
        """Every compile that was begun, as ``ROLE CONFIG``."""
        return (self.kernel.directory / "compiles").read_text().splitlines()
