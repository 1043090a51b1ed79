"""Races between launch configs, with any Optuna pruner as the judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import optuna
from optuna.trial import TrialState, create_trial

from moeopt.core.trial import Cell, Job, Measurement
from moeopt.search.ledger import Ledger
from moeopt.search.pruner import RacingPruner

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.trial import Trial


class PrunerRace:
    """Asks a pruner, round by round, whether a job has lost.

    :class:`~moeopt.search.pruner.RacingPruner` is asked directly, against what a config has to beat to be of
    use: up and down share BLOCK_SIZE_M, so that the best pair may hold a config that is not the best of
    its cell. Any other pruner sees one in-memory study per cell, with rounds as steps and µs as
    intermediate values.

    Args:
        pruner: Any Optuna pruner.
        ledger: What has been measured.
    """

    def __init__(self, pruner: BasePruner, ledger: Ledger) -> None:
        self._pruner = pruner
        self._ledger = ledger
        self._studies: dict[Cell, optuna.Study] = {}
        self._running: dict[Job, Trial] = {}

    def lost(self, job: Job, rounds: Sequence[float]) -> bool:
        """Whether to stop timing this job, given its rounds so far (µs)."""
        if isinstance(self._pruner, RacingPruner):
            incumbent, to_beat = self._ledger.incumbent(job.cell), self._ledger.to_beat(job)
            if incumbent is None:
                return False
            if to_beat is None:  # nobody knows yet what the other role makes of this BLOCK_SIZE_M
                return self._pruner.lost(rounds[:1], incumbent.us)
            # Who is faster than the cell's best is timed in full, whatever the other role has been timed with so far.
            slower = max(to_beat / incumbent.median_us, 1.0)
            return self._pruner.lost(rounds, [us * slower for us in incumbent.us])
        trial = self._running.get(job)
        if trial is None:
            trial = self._running[job] = self._study(job.cell).ask()
        trial.report(rounds[-1], step=len(rounds) - 1)
        return trial.should_prune()

    def tell(self, measurements: Sequence[Measurement]) -> None:
        """Takes finished measurements into the pruner's studies."""
        if isinstance(self._pruner, RacingPruner):
            return
        for m in measurements:
            study = self._study(m.job.cell)
            trial = self._running.pop(m.job, None)
            if trial is None and m.us:  # answered from a database: the pruner should know it all the same
                study.add_trial(
                    create_trial(
                        state=TrialState.COMPLETE if m.status == "ok" else TrialState.PRUNED,
                        value=m.median_us,
                        intermediate_values=dict(enumerate(m.us)),
                    )
                )
            elif trial is not None and m.status == "ok":
                study.tell(trial, m.median_us)
            elif trial is not None:
                study.tell(trial, state=TrialState.PRUNED if m.us else TrialState.FAIL)

    def _study(self, cell: Cell) -> optuna.Study:
        if cell not in self._studies:
            self._studies[cell] = quiet_study(self._pruner, optuna.samplers.RandomSampler(seed=0))
        return self._studies[cell]


def quiet_study(pruner: BasePruner, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """A minimising study in memory, made without a line in the log."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
    try:
        return optuna.create_study(direction="minimize", sampler=sampler, pruner=pruner)
    finally:
        optuna.logging.set_verbosity(before)
