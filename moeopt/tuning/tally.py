"""Counts and seconds of a run, as it goes on."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role
from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.measure.base import Device
from moeopt.tuning.outcome import Counts

_OUTCOMES: Final[Mapping[str, str]] = {"ok": "timed", "raced_out": "timed", "rejected": "rejected", "failed": "failed"}


@dataclass
class Tally:
    """What became of the jobs of this run.

    Attributes:
        status: Measurements by status.
        elsewhere: Of those that were timed, how many another process timed.
        resumed: Measurements that came from the database.
    """

    status: Counter[str] = field(default_factory=Counter)
    elsewhere: int = 0
    resumed: int = 0
    _stored: Counter[str] = field(default_factory=Counter)
    _compiled_before: set[tuple[LaunchConfig, Role]] = field(default_factory=set)
    _compiled: set[tuple[LaunchConfig, Role]] = field(default_factory=set)
    _reasons: Counter[str] = field(default_factory=Counter)

    def add(self, measurement: Measurement, *, elsewhere: bool = False) -> None:
        """Counts a measurement of this run, and whether another process timed it."""
        self.elsewhere += elsewhere and measurement.status in ("ok", "raced_out")
        self.status[measurement.status] += 1
        self._compiled.update((measurement.job.config, role) for role in measurement.resources)
        if measurement.failure is not None and measurement.status == "failed":
            self._reasons[measurement.failure.reason] += 1

    def resume(self, measurements: Iterable[Measurement]) -> None:
        """Counts measurements that came from the database."""
        for measurement in measurements:
            self.resumed += 1
            self._stored[_OUTCOMES[measurement.status]] += 1
            self._compiled_before.update((measurement.job.config, role) for role in measurement.resources)

    def counts(self, space: int = 0, infeasible: int = 0) -> Counts:
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
            elsewhere=self.elsewhere,
            stored=self._stored | {"compiled": len(self._compiled_before)} if self.resumed else {},
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
