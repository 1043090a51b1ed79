"""Counts and seconds of a run, as it goes on."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role
from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.measure.base import Device
from moeopt.tuning.outcome import Counts


@dataclass
class Tally:
    """What became of the jobs of this run.

    Attributes:
        status: Measurements by status.
        resumed: Measurements that came from the database.
    """

    status: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    _compiled: set[tuple[LaunchConfig, Role]] = field(default_factory=set)
    _reasons: Counter[str] = field(default_factory=Counter)

    def add(self, measurement: Measurement) -> None:
        """Counts a measurement of this run."""
        self.status[measurement.status] += 1
        self._compiled.update((measurement.job.config, role) for role in measurement.resources)
        if measurement.failure is not None and measurement.status == "failed":
            self._reasons[measurement.failure.reason] += 1

    def counts(self, space: int, infeasible: int) -> Counts:
        """As a part of the outcome.

        Args:
            space: Configs of the space.
            infeasible: Of these, over the GPU's limits.
        """
        return Counts(
            space=space,
            infeasible=infeasible,
            compiled=len(self._compiled),
            rejected=self.status["rejected"],
            measured=self.status["ok"] + self.status["raced_out"],
            raced_out=self.status["raced_out"],
            failed=self.status["failed"],
            unique_compiled=len({config for config, _ in self._compiled}),
            resumed=self.resumed,
            reasons=dict(self._reasons),
        )


class Stopwatch:
    """Seconds that a run has spent on each of its parts (``search``, ``measure``, ``storage``)."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Adds what is spent within it."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - start

    def measure(self, device: Device, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        """:meth:`Device.measure`, with the time that it takes put down; asks for nothing where there are no jobs."""
        if not jobs:
            return
        with closing(device.measure(jobs, race)) as results:
            while True:
                with self.time("measure"):
                    measurement = next(results, None)
                if measurement is None:
                    return
                yield measurement
