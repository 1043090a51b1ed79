"""What the worker tests share: a compiler with nothing to do, and devices over a recording."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from moeopt.compile import Compiled
from moeopt.core.config import LaunchConfig
from moeopt.core.provenance import Provenance
from moeopt.core.shape import Role
from moeopt.core.trial import Failure
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.measure.base import DeviceSpec
from moeopt.measure.supervisor import Deadlines, Supervisor
from moeopt.measure.worker_device import WorkerDevice
from moeopt.recordings.format import Recording
from moeopt.testing.faults import FaultyBench

QUICK = Deadlines(start=60.0, prepare=20.0, first_check=0.5, floor=0.5, factor=20.0)


class RecordedCompiler:
    """Answers from a recording, at once or when told to."""

    def __init__(self, recording: Recording, *, held: bool = False) -> None:
        self.recording = recording
        self.held = held
        self.asked: list[tuple[LaunchConfig, Role, int, int]] = []
        self.open: list[tuple[Future[Compiled], Compiled]] = []
        self.closed = False

    def submit(self, config: LaunchConfig, role: Role, batch_size: int, *, priority: int = 0) -> Future[Compiled]:
        self.asked.append((config, role, batch_size, priority))
        row = self.recording.rows.get(config)
        if row is None or role not in row.roles:
            error = "not in the recording" if row is None else row.error or row.status
            compiled = Compiled(config, role, role, failure=Failure("compile", error))
        else:
            compiled = Compiled(config, role, role, resources=row.resources(role))
        future: Future[Compiled] = Future()
        if self.held:
            self.open.append((future, compiled))
        else:
            future.set_result(compiled)
        return future

    def release(self, count: int) -> None:
        for future, compiled in self.open[:count]:
            if future.set_running_or_notify_cancel():
                future.set_result(compiled)
        del self.open[:count]

    def close(self) -> None:
        self.closed = True


def make_device(
    path: Path,
    tmp_path: Path,
    *,
    bench: FaultyBench | None = None,
    faults: Mapping[LaunchConfig, Any] | None = None,
    batch_sizes: tuple[int, ...] = (1,),
    deadlines: Deadlines = QUICK,
    held: bool = False,
    **options: Any,
) -> WorkerDevice:
    """A worker device whose worker replays a recording."""
    recording = Recording.load(path)
    kernel = BuiltinKernel()
    info = Provenance("test", "builtin", "0", "0", "3.6.0", "2.11.0")
    return WorkerDevice(
        spec=DeviceSpec.of_kernel(kernel, recording.shape, recording.gpu, info),
        kernel=kernel,
        supervisor=Supervisor(bench or FaultyBench(path, faults or {}), tmp_path / "gpu.log", deadlines=deadlines),
        compiler=RecordedCompiler(recording, held=held),
        batch_sizes=batch_sizes,
        **options,
    )
