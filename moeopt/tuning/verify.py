"""Default, existing and tuned configs against each other, and which of them to keep.

A config that was best in one search may have been lucky. Here the candidates take turns on the same
device, so that whatever drifts, drifts for all of them, and a row is replaced only where the gain
is more than its noise and more than one percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from moeopt.core.shape import ROLES
from moeopt.core.table import ConfigPair, ConfigTable
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import InvalidInputError
from moeopt.export import import_configs
from moeopt.measure.base import Device

DEFAULT_PASSES: Final = 10
MINIMUM_GAIN: Final = 0.01
CONFIDENCE: Final = 0.95
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Arm:
    """One candidate at one batch size.

    Attributes:
        name: Such as ``default``, ``existing`` or ``tuned``.
        pair: Its configs.
        up_us: Median microseconds of the up projection, or None where it has no time.
        down_us: The same for down.
        interval_us: Bootstrap interval of the sum.
        failure: Why it has no time, in one line.
    """

    name: str
    pair: ConfigPair
    up_us: float | None = None
    down_us: float | None = None
    interval_us: tuple[float, float] | None = None
    failure: str | None = None

    @property
    def total_us(self) -> float | None:
        """Both projections, or None."""
        return self.up_us + self.down_us if self.up_us is not None and self.down_us is not None else None


@dataclass(frozen=True, slots=True)
class VerifiedRow:
    """What to keep at one batch size.

    Attributes:
        batch_size: M.
        arms: All candidates, the one in use today first.
        kept: Name of the one to keep.
        best: Name of the one with the least median.
        gain: Share of today's time that ``best`` saves; negative where nothing is better.
        interval: Bootstrap interval of the gain.
        reason: Why, in a few words.
    """

    batch_size: int
    arms: tuple[Arm, ...]
    kept: str
    best: str
    gain: float
    interval: tuple[float, float]
    reason: str

    def arm(self, name: str) -> Arm:
        """The candidate of this name."""
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Verification:
    """The outcome of :func:`verify`.

    Attributes:
        rows: One per batch size, ascending.
        baseline: Name of what is in use today.
        source: Where the times come from.
        replayed: Whether they are replayed from a recording: then the intervals are those of the
            recording's rounds, and nothing was interleaved.
        passes: How often all candidates took their turn.
        disturbed: Timings taken while another process used the GPU or the control config drifted.
    """

    rows: tuple[VerifiedRow, ...]
    baseline: str
    source: str
    replayed: bool
    passes: int
    disturbed: int = 0

    def configs(self) -> ConfigTable:
        """The kept configs."""
        return ConfigTable({row.batch_size: row.arm(row.kept).pair for row in self.rows})

    def replaced(self) -> list[int]:
        """Batch sizes where something else than today's row is kept."""
        return [row.batch_size for row in self.rows if row.kept != self.baseline]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "source": self.source,
            "replayed": self.replayed,
            "baseline": self.baseline,
            "passes": self.passes,
            "disturbed": self.disturbed,
            "batch_sizes": {str(row.batch_size): _row_dict(row) for row in self.rows},
        }


def verify(
    device: Device,
    tables: Mapping[str, Mapping[int, ConfigPair]],
    *,
    passes: int = DEFAULT_PASSES,
    minimum_gain: float = MINIMUM_GAIN,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Verification:
    """Lets tables of configs take turns, and decides row by row.

    In each pass every config is timed once, those of one cell one after the other, in an order that
    rotates from pass to pass. The tables are gone through in their order: a later one takes the row
    from the one that holds it if the bootstrap interval of its gain lies above zero and the gain is
    at least ``minimum_gain``.

    Args:
        device: Times them; a recorded device replays its rounds, in one pass.
        tables: By name; the first is what is in use today. All of the first one's batch sizes are
            looked at; others may lack some.
        passes: Turns of each config.
        minimum_gain: Least share of the time that has to be saved.
        confidence: Of the intervals.
        seed: Of the bootstrap.

    Raises:
        InvalidInputError: There is nothing to compare, or a number is out of range.
    """
    if len(tables) < 2:
        raise InvalidInputError("verify was given one table of configs: give at least two to compare")
    if passes < 1 or not 0 <= minimum_gain < 1 or not 0 < confidence < 1:
        raise InvalidInputError(
            f"passes {passes}, minimum_gain {minimum_gain} and confidence {confidence}: give at least 1, "
            "a share from 0, and a share below 1"
        )
    baseline, batch_sizes = next(iter(tables)), sorted(next(iter(tables.values())))
    if not batch_sizes:
        raise InvalidInputError(f"the table {baseline!r} has no batch sizes: there is nothing to compare")
    provenance = device.spec.provenance
    passes = 1 if provenance.recorded else passes
    samples = _Samples()
    for number in range(passes):
        for measurement in device.measure(_turn(tables, batch_sizes, number)):
            samples.add(measurement)
    rows = []
    for m in batch_sizes:
        names = [name for name, table in tables.items() if m in table]
        generator = np.random.default_rng([seed, m])
        rows.append(_judge(m, {n: tables[n][m] for n in names}, samples, minimum_gain, confidence, generator))
    return Verification(
        tuple(rows), baseline, provenance.source, provenance.recorded, passes, disturbed=samples.disturbed
    )


def default_table(device: Device, batch_sizes: Sequence[int]) -> ConfigTable:
    """What the engine runs where it finds no file."""
    default = device.spec.default_config
    return ConfigTable({m: ConfigPair(default("up", m), default("down", m)) for m in batch_sizes})


def tables_to_compare(
    device: Device,
    engine: str,
    tuned: ConfigTable | Path,
    existing: Path | None,
    batch_sizes: Sequence[int] | None,
    triton_version: str,
) -> dict[str, ConfigTable]:
    """Existing (if given), default and tuned configs, in the order in which a row may be taken over.

    Args:
        device: Will time them.
        engine: Whose files are read.
        tuned: The tuned configs, or a directory with files of them.
        existing: A directory with the files that a server reads today.
        batch_sizes: What is compared; None for all that are tuned and that the device can time.
        triton_version: Of the server.

    Raises:
        InvalidInputError: A batch size is not tuned or not in the recording, or files cannot be used.
    """
    shape, gpu = device.spec.shape, device.spec.gpu
    if isinstance(tuned, Path):
        files = import_configs(engine, tuned, shape, gpu, triton_version)
        table = files.table(_timed(device, tuple(batch_sizes or files.up), every=batch_sizes is not None))
    else:
        table = tuned.take(batch_sizes or tuned)
    tables = {"default": default_table(device, tuple(table)), "tuned": table}
    if existing is None:
        return tables
    return {"existing": import_configs(engine, existing, shape, gpu, triton_version).table(table), **tables}


def _timed(device: Device, keys: tuple[int, ...], *, every: bool) -> tuple[int, ...]:
    """Of these batch sizes, those that the device can time; an error where it is none, or not ``every`` one."""
    there = device.spec.batch_sizes
    found = tuple(m for m in keys if there is None or m in there)
    if not found or (every and found != keys):
        missing = next(m for m in keys if m not in found)
        raise InvalidInputError(
            f"batch size {missing} is not in the recording: it holds {', '.join(map(str, there or ()))}"
        )
    return found


def _turn(tables: Mapping[str, Mapping[int, ConfigPair]], batch_sizes: Sequence[int], number: int) -> list[Job]:
    """One pass over all distinct configs: those of a cell side by side, in rotating order."""
    jobs: list[Job] = []
    for m in batch_sizes:
        for role in ROLES:
            configs = list(dict.fromkeys(table[m].config(role) for table in tables.values() if m in table))
            first = number % len(configs)
            jobs += [Job(Cell(role, m), config) for config in configs[first:] + configs[:first]]
    return jobs


@dataclass
class _Samples:
    """Medians of each pass, by job; of a replayed job its rounds."""

    us: dict[Job, list[float]] = field(default_factory=dict)
    rounds: dict[Job, list[float]] = field(default_factory=dict)
    failures: dict[Job, str] = field(default_factory=dict)
    disturbed: int = 0

    def add(self, measurement: Measurement) -> None:
        job = measurement.job
        self.disturbed += "disturbed" in measurement.extra
        if measurement.status != "ok":
            self.failures[job] = measurement.failure.message if measurement.failure else measurement.status
        else:
            self.us.setdefault(job, []).append(measurement.median_us)
            self.rounds.setdefault(job, list(measurement.us))

    def of(self, pair: ConfigPair, batch_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]] | str:
        """Samples of up and down, as many of each; or why there are none."""
        found = []
        for role in ROLES:
            job = Job(Cell(role, batch_size), pair.config(role))
            if job in self.failures or job not in self.us:
                return f"{role}: {self.failures.get(job, 'was not timed')}"
            us = self.us[job] if len(self.us[job]) > 1 else self.rounds[job]
            found.append(np.asarray(us, dtype=np.float64))
        return found[0], found[1]


def _judge(
    m: int,
    pairs: Mapping[str, ConfigPair],
    samples: _Samples,
    minimum_gain: float,
    confidence: float,
    generator: np.random.Generator,
) -> VerifiedRow:
    tail = 100 * (1 - confidence) / 2
    arms: dict[str, Arm] = {}
    resampled: dict[str, NDArray[np.float64]] = {}
    # One set of draws for all: candidates that were timed in the same pass stay together.
    draws = generator.random((_RESAMPLES, 64))
    for name, pair in pairs.items():
        found = samples.of(pair, m)
        if isinstance(found, str):
            arms[name] = Arm(name, pair, failure=found)
            continue
        up, down = found
        totals = _medians(up, draws) + _medians(down, draws)
        low, high = np.percentile(totals, [tail, 100 - tail])
        resampled[name] = totals
        arms[name] = Arm(name, pair, float(np.median(up)), float(np.median(down)), (float(low), float(high)))
    baseline = next(iter(pairs))
    kept, reason = baseline, ""
    for name in list(pairs)[1:]:
        if arms[kept].total_us is None and arms[name].total_us is not None:
            kept, reason = name, f"{kept} has no time ({arms[kept].failure})"
        elif name in resampled and kept in resampled:
            gain, (low, _) = _gain(arms[kept], arms[name], resampled, tail)
            if gain >= minimum_gain and low > 0:
                kept, reason = name, f"{100 * gain:.1f} % faster than {kept}"
    timed = [arm for arm in arms.values() if arm.total_us is not None]
    best = min(timed, key=lambda arm: arm.total_us or 0.0).name if timed else baseline
    gain, interval = (0.0, (0.0, 0.0))
    if baseline in resampled and best in resampled:
        gain, interval = _gain(arms[baseline], arms[best], resampled, tail)
    reason = reason or _why_kept(kept, best, gain, interval)
    return VerifiedRow(m, tuple(arms.values()), kept, best, gain, interval, reason)


def _why_kept(kept: str, best: str, gain: float, interval: tuple[float, float]) -> str:
    if best == kept:
        return f"{kept} is kept: nothing is faster"
    if interval[0] <= 0:
        return f"{kept} is kept: the gain of {best} ({100 * gain:.1f} %) is within its noise"
    return f"{kept} is kept: the gain of {best} ({100 * gain:.1f} %) is too small"


def _gain(
    old: Arm, new: Arm, resampled: Mapping[str, NDArray[np.float64]], tail: float
) -> tuple[float, tuple[float, float]]:
    low, high = np.percentile(1.0 - resampled[new.name] / resampled[old.name], [tail, 100 - tail])
    return 1.0 - (new.total_us or 0.0) / (old.total_us or 1.0), (float(low), float(high))


def _medians(values: NDArray[np.float64], draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Medians of resamples with replacement; ``draws`` are uniform on [0, 1), one column per sample."""
    count = len(values)
    columns = np.resize(np.arange(draws.shape[1]), count)
    medians: NDArray[np.float64] = np.median(values[(draws[:, columns] * count).astype(np.intp)], axis=1)
    return medians


def _row_dict(row: VerifiedRow) -> dict[str, Any]:
    return {
        "kept": row.kept,
        "best": row.best,
        "gain": round(row.gain, 5),
        "interval": [round(v, 5) for v in row.interval],
        "reason": row.reason,
        "arms": {
            arm.name: {
                **arm.pair.to_dict(),
                "up_us": arm.up_us,
                "down_us": arm.down_us,
                "interval_us": arm.interval_us,
                "failure": arm.failure,
            }
            for arm in row.arms
        },
    }
