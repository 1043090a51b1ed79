"""Progress of the tunes in a study database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from moeopt.core.trial import Cell
from moeopt.storage.facts import Run
from moeopt.storage.store import StoredTrial, StudyKey, StudyStore, StudySummary
from moeopt.tuning.load import load_result
from moeopt.tuning.outcome import BatchResult

# A run whose last trial is older is not measuring any more (or compiles something very slow).
_ALIVE_S: Final = 60.0
_RATE_WINDOW_S: Final = 120.0


@dataclass(frozen=True)
class KeyStatus:
    """Everything of one key.

    Attributes:
        key: Which.
        states: Trials by Optuna's state.
        reasons: Trials without a full time, by reason (``raced out``, ``compile``, ...).
        rows: The best so far per batch size.
        timed: Configs timed per cell.
        runs: Its runs.
        last: When the last trial ended, local time, or None.
        seconds_left: Estimate for the unfinished run that is going on, or None where none is.
    """

    key: StudyKey
    states: Mapping[str, int]
    reasons: Mapping[str, int]
    rows: Mapping[int, BatchResult]
    timed: Mapping[Cell, int]
    runs: tuple[Run, ...]
    last: datetime | None
    seconds_left: float | None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {
            "name": self.key.title(),
            "key": {**self.key.attrs(), "digest": self.key.digest},
            "trials": dict(self.states),
            "reasons": dict(self.reasons),
            "best": {str(m): {**row.to_dict(), "speedup": row.speedup} for m, row in self.rows.items()},
            "timed": {f"{cell.role} {cell.batch_size}": n for cell, n in self.timed.items()},
            "runs": [
                {
                    "tag": run.tag,
                    "space": run.space,
                    "seed": run.seed,
                    "trials": run.trials,
                    "batch_sizes": list(run.batch_sizes),
                    "finished": run.finished,
                }
                for run in self.runs
            ],
            "last_trial": self.last.isoformat(timespec="seconds") if self.last else None,
            "seconds_left": self.seconds_left,
        }


def storage_status(store: StudyStore) -> list[KeyStatus]:
    """The status of every key in a database.

    Args:
        store: An open database.
    """
    return [_key_status(store, summary) for summary in store.keys()]  # noqa: SIM118  (a method of ours, no dict)


def _key_status(store: StudyStore, summary: StudySummary) -> KeyStatus:
    key, cells = summary.key, tuple(summary.cells)
    trials = store.load(key, cells)
    states: Counter[str] = Counter()
    for counts in summary.cells.values():
        states.update(counts)
    reasons: Counter[str] = Counter()
    for trial in (trial for found in trials.values() for trial in found):
        measurement = trial.measurement
        if measurement.status == "raced_out":
            reasons["raced out"] += 1
        elif measurement.status == "rejected":
            reasons["rejected"] += 1
        elif measurement.failure is not None:
            reasons[measurement.failure.reason] += 1
    runs = tuple(store.runs(key))
    ended = sorted(t.ended for found in trials.values() for t in found if t.ended is not None)
    return KeyStatus(
        key=key,
        states=dict(sorted(states.items())),
        reasons=dict(sorted(reasons.items())),
        rows=load_result(store, key, trials).rows,
        timed={cell: sum(1 for t in found if t.measurement.us) for cell, found in trials.items()},
        runs=runs,
        last=ended[-1] if ended else None,
        seconds_left=_seconds_left(trials, runs, ended),
    )


def _seconds_left(
    trials: Mapping[Cell, Sequence[StoredTrial]], runs: Sequence[Run], ended: Sequence[datetime]
) -> float | None:
    """What the unfinished runs' budgets leave, at the rate of the last two minutes."""
    now = datetime.now()
    open_runs = [run for run in runs if not run.finished]
    if not open_runs or not ended or (now - ended[-1]).total_seconds() > _ALIVE_S:
        return None
    recent = [when for when in ended if when > now - timedelta(seconds=_RATE_WINDOW_S)]
    span = (now - recent[0]).total_seconds()
    if len(recent) < 2 or span <= 0:
        return None
    left = 0
    for cell, found in trials.items():
        budget = max((run.trials for run in open_runs if cell.batch_size in run.batch_sizes), default=0)
        left += max(0, budget - len(found))
    return round(left * span / len(recent), 1)
