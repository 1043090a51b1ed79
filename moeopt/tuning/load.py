"""Outcome of what a study database holds for one key: nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moeopt.core.trial import Cell, Job, Mode
from moeopt.search.ledger import Ledger
from moeopt.storage.store import StoredTrial, StudyKey, StudyStore
from moeopt.tuning.assemble import assemble
from moeopt.tuning.baselines import load_baselines
from moeopt.tuning.finalists import with_finals
from moeopt.tuning.outcome import Outcome
from moeopt.tuning.tally import Tally


def kept_finals(store: StudyStore, key: StudyKey, cells: Sequence[Cell]) -> dict[Job, tuple[float, ...]]:
    """The finalists' times that the database holds for these cells."""
    return {Job(cell, config): us for cell in cells for config, us in (store.facts(key, cell).finals or {}).items()}


def load_result(
    store: StudyStore, key: StudyKey, trials: Mapping[Cell, Sequence[StoredTrial]] | None = None
) -> Outcome:
    """The best that a study database holds for one key, without tuning.

    Args:
        store: An open database.
        key: One of its keys.
        trials: All trials of the key, where they have been loaded.
    """
    cells = store.cells(key)
    trials = store.load(key, cells) if trials is None else trials
    mode: Mode = "joint" if key.mode == "joint" else "split"
    ledger, tally = Ledger(cells), Tally()
    for found in trials.values():
        ledger.add(trial.measurement for trial in found)
        tally.resume(trial.measurement for trial in found)
    final = with_finals(ledger, kept_finals(store, key, cells))
    return Outcome(
        shape=key.shape,
        gpu=key.gpu,
        info=replace(key.provenance, source=f"loaded from {store.display}"),
        mode=mode,
        space="",
        seed=None,
        wall_s=0.0,
        rows=assemble(mode, final, final.choose(raced_out=True), load_baselines(store, key, cells)),
        counts=tally.counts(),
        storage=store.url,
        key=key,
    )
