"""Runs of a tune, and their resumption by replay.

Every stored trial carries the tag of its run, and a run with the same tag is answered from the database for
as long as it asks for what is there. The search being a function of its seed and of what it was told, the end
is that of a run that was never cut off. Trials of other runs are known from the start and count toward the
budget.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.storage.facts import CellFacts, Run
from moeopt.storage.store import StoredTrial, StudyKey, StudyStore
from moeopt.tuning.options import TuneOptions

# A change of the search, its recordings or the cost model's fits that makes old runs not replayable raises this.
SEARCH_VERSION: Final = 8


@dataclass(frozen=True)
class Replay:
    """What the database holds when a run begins.

    Attributes:
        memo: Trials of the same run, cut off earlier: they are the answers when it asks for them again.
        known: Trials of other runs, and of this one where it is finished.
    """

    memo: Mapping[Job, Measurement]
    known: Mapping[Cell, Sequence[Measurement]]

    @classmethod
    def of(cls, stored: Mapping[Cell, Sequence[StoredTrial]], run: Run) -> Replay:
        """Tells the trials of a run from the others."""
        memo: dict[Job, Measurement] = {}
        known: dict[Cell, list[Measurement]] = {cell: [] for cell in stored}
        for cell, trials in stored.items():
            for trial in trials:
                if trial.run == run.tag and not run.finished:
                    memo[trial.measurement.job] = trial.measurement
                else:
                    known[cell].append(trial.measurement)
        return cls(memo, known)


def new_run(options: TuneOptions, space: SearchSpace, candidates: int) -> Run:
    """A run as it begins, still without its portfolio.

    Args:
        options: What it is to do.
        space: What it searches.
        candidates: Configs of the space that fit the GPU.
    """
    what = {
        "search": SEARCH_VERSION,
        "cells": [[cell.role, cell.batch_size] for cell in options.cells()],
        "space": [space.name, {k: list(v) for k, v in space.values.items()}],
        "candidates": candidates,
        "trials": options.trials,
        "seed": options.seed,
        "sampler": _describe(options.sampler),
        "pruner": _describe(options.pruner),
    }
    return Run(
        tag=hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12],
        space=space.name,
        params=tuple(space.values),
        trials=options.trials,
        seed=options.seed,
        batch_sizes=options.batch_sizes,
    )


def kept_run(store: StudyStore, key: StudyKey, options: TuneOptions, tag: str) -> Run | None:
    """What an earlier run with the same tag left behind, or None."""
    return store.facts(key, options.cells()[0]).runs.get(tag)


def keep_run(store: StudyStore, key: StudyKey, options: TuneOptions, run: Run) -> None:
    """Keeps a run with the first of its cells."""
    store.add_facts(key, {options.cells()[0]: CellFacts(runs={run.tag: run})})


def _describe(part: object) -> str | None:
    """Names a sampler or pruner by its type: two of one type count as the same."""
    return None if part is None else f"{type(part).__module__}.{type(part).__qualname__}"
