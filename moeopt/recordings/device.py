"""Device that replays a recording."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from moeopt import engines
from moeopt.core.config import REQUIRED_KEYS, LaunchConfig
from moeopt.core.shape import Role
from moeopt.core.trial import Cell, Failure, Job, Measurement, Race, Reason, never_stop
from moeopt.measure.base import Device, DeviceSpec
from moeopt.recordings.format import Recording


class RecordedDevice(Device):
    """Replays a recording: the same loop as on a GPU, without one."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        source = (
            f"replaying {recording.path.name}: times measured earlier on {recording.gpu.name}, "
            "nothing is measured on this machine"
        )
        super().__init__(
            DeviceSpec(
                shape=recording.shape,
                gpu=recording.gpu,
                provenance=recording.header.provenance(source),
                candidates=self._candidates,
                default_config=self._default_config,
                roofline_us=self._roofline_us,
                batch_sizes=recording.batch_sizes,
                space_extras=tuple(key for key in (recording.header.space or {}) if key not in REQUIRED_KEYS),
            )
        )

    def _candidates(self, configs: Sequence[LaunchConfig]) -> list[LaunchConfig]:
        """Those that the recording holds and that fit the GPU.

        A config that did not compile stays in: on a GPU, too, that shows only when it is tried.
        """
        rows = self.recording.rows
        return [c for c in configs if c in rows and rows[c].status != "out_of_resources"]

    def _default_config(self, role: Role, batch_size: int) -> LaunchConfig:
        engine = engines.of_kernel(self.spec.provenance.kernel)
        return engine.default_config(self.spec.shape, batch_size, self.spec.gpu)

    def _roofline_us(self, cell: Cell) -> float | None:
        rooflines = self.recording.header.roofline_us or {}
        try:
            return sum(rooflines[role][cell.batch_size] for role in cell.roles)
        except KeyError:
            return None

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for job in jobs:
            yield self._measure(job, race)

    def _measure(self, job: Job, race: Race) -> Measurement:
        row = self.recording.rows.get(job.config)
        if row is None:
            return Measurement(job, "failed", failure=Failure("constraints", "not in the recording"))
        if row.status != "ok":
            reason: Reason = "constraints" if row.status == "out_of_resources" else "compile"
            return Measurement(job, "failed", failure=Failure(reason, row.error or row.status))
        cell = job.cell
        if any(cell.batch_size not in row.roles[role].us for role in cell.roles):
            return Measurement(
                job, "failed", failure=Failure("constraints", f"batch size {cell.batch_size} is not in the recording")
            )
        per_role = [row.roles[role].us[cell.batch_size] for role in cell.roles]
        resources = {role: row.resources(role) for role in cell.roles}
        errors = [row.roles[role].relative_error for role in cell.roles]
        rounds: list[float] = []
        raced_out = False
        for values in zip(*per_role, strict=False):
            rounds.append(sum(values))
            raced_out = race(job, rounds)
            if raced_out:
                break
        return Measurement(
            job,
            "raced_out" if raced_out else "ok",
            us=tuple(rounds),
            relative_error=max((e for e in errors if e is not None), default=None),
            resources=resources,
        )
