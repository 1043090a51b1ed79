"""Times of launches at batch sizes that were not tuned: estimated from a database, or measured."""

from __future__ import annotations

from collections import defaultdict

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role
from moeopt.core.trial import Cell, Job
from moeopt.export.extra_batch_sizes import InterpolatedTimes, TimeUs
from moeopt.measure.base import Device
from moeopt.storage.store import StudyKey, StudyStore


def stored_times(store: StudyStore, key: StudyKey) -> TimeUs:
    """Estimates from everything that a study database holds for a key.

    What was raced out has no time: it was timed in a few rounds, until it was known to be slower than another.
    """
    times: dict[tuple[Role, LaunchConfig], dict[int, float]] = defaultdict(dict)
    joint = False
    cells = next((tuple(s.cells) for s in store.keys() if s.key == key), ())  # noqa: SIM118  (a method of ours)
    for cell, trials in store.load(key, cells).items():
        for measurement in (t.measurement for t in trials):
            if measurement.status != "ok":
                continue
            joint |= cell.role == "joint"
            role: Role = "up" if cell.role == "joint" else cell.role
            times[role, measurement.job.config][cell.batch_size] = measurement.median_us
    estimate = InterpolatedTimes(times)
    # A joint time is of both launches: it stands under up.
    return (lambda role, m, config: estimate(role, m, config) if role == "up" else 0.0) if joint else estimate


def measured_times(device: Device) -> TimeUs:
    """Times from the device, each asked for once; between the batch sizes of a recording they are estimated."""
    known: dict[tuple[Role, int, LaunchConfig], float | None] = {}
    sizes = device.spec.batch_sizes

    def measured(role: Role, batch_size: int, config: LaunchConfig) -> float | None:
        key = role, batch_size, config
        if key not in known:
            known[key] = None
            for measurement in device.measure([Job(Cell(role, batch_size), config)]):
                known[key] = measurement.median_us if measurement.us else None
        return known[key]

    def time_us(role: Role, batch_size: int, config: LaunchConfig) -> float | None:
        if sizes is None or batch_size in sizes:
            return measured(role, batch_size, config)
        around = (
            max((m for m in sizes if m < batch_size), default=0),
            min((m for m in sizes if m > batch_size), default=0),
        )
        times = {m: us for m in around if m and (us := measured(role, m, config)) is not None}
        return InterpolatedTimes({(role, config): times})(role, batch_size, config)

    return time_us
