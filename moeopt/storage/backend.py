"""Study database over Optuna's own storage interface; what is slow there, a relational one overrides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from moeopt.core.config import PARAMETERS
from moeopt.storage.codec import PACKED, StudyRow, TrialRow, repack, unpack, unpack_all

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

# What was packed into a trial's attributes, and when the trial ended (local time).
Packed = tuple[Mapping[str, Any], datetime | None]
# A process that says that it lives every few seconds, as Optuna's can, is dead after so many without a word.
SILENT_S: Final = 60.0


class Backend(ABC):
    """A database of Optuna studies, with bulk operations.

    Any method raises :class:`moeopt.storage.retry.TransientError` where trying again may help, and StorageError
    where not.

    Attributes:
        storage: Optuna's storage over the same data.
    """

    def __init__(self, storage: BaseStorage) -> None:
        self.storage = storage

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Within it the database's errors come out as ours."""

    def batch(self) -> AbstractContextManager[None]:
        """:meth:`errors`; what is written within it may be put together."""
        return self.errors()

    def close(self) -> None:
        """Lets go of all connections and files."""

    def studies(self) -> list[StudyRow]:
        """All studies, with their user attributes."""
        with self.errors():
            studies = self.storage.get_all_studies()
        return [StudyRow(s._study_id, s.study_name, unpack_all(s.user_attrs)) for s in studies]

    def ensure_studies(self, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """Creates the studies (name -> user attributes) that are not there; returns the ids of all."""
        ids = {study.name: study.study_id for study in self.studies() if study.name in wanted}
        missing = [name for name in wanted if name not in ids]
        for name in missing:
            with self.errors():
                try:
                    ids[name] = self.storage.create_new_study([StudyDirection.MINIMIZE], name)
                except DuplicatedStudyError:
                    ids[name] = self.storage.get_study_id_from_name(name)
        if missing:
            self.set_attrs({ids[name]: wanted[name] for name in missing})
        return ids

    def set_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        """Sets user attributes of studies (id -> attributes), long ones split."""
        with self.batch():
            for study_id, values in attrs.items():
                there = self.storage.get_study_user_attrs(study_id)
                for key, whole in values.items():
                    for part, value in repack(key, whole, there).items():
                        self.storage.set_study_user_attr(study_id, part, value)

    def set_system_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        """Sets system attributes of studies (id -> attributes), as they are."""
        with self.batch():
            for study_id, values in attrs.items():
                for key, value in values.items():
                    self.storage.set_study_system_attr(study_id, key, value)

    def add_trials(self, rows: Sequence[tuple[int, TrialRow]], *, retry: bool = False) -> None:
        """Adds finished trials (study id, trial).

        Args:
            rows: What to add.
            retry: An earlier call with the same rows failed, perhaps after the database had taken some of them.
        """
        if retry:
            there = {study_id: self._packed_parts(study_id) for study_id in {study_id for study_id, _ in rows}}
            rows = [(s, row) for s, row in rows if packed_part(row.user_attrs) not in there[s]]
        with self.batch():
            for study_id, row in rows:
                self.storage.create_new_trial(study_id, frozen_trial(row))

    def _packed_parts(self, study_id: int) -> list[dict[str, Any]]:
        with self.errors():
            return [packed_part(t.user_attrs) for t in self.storage.get_all_trials(study_id, deepcopy=False)]

    def packed(self, study_ids: Sequence[int]) -> dict[int, list[Packed]]:
        """For each study the packed attribute of each finished trial and when it ended, oldest first."""
        out: dict[int, list[Packed]] = {}
        finished = (TrialState.COMPLETE, TrialState.PRUNED)
        for study_id in study_ids:
            with self.errors():
                trials = self.storage.get_all_trials(study_id, deepcopy=False, states=finished)
            found = ((unpack(PACKED, packed_part(t.user_attrs)), _naive(t.datetime_complete)) for t in trials)
            out[study_id] = [(value, ended) for value, ended in found if isinstance(value, dict)]
        return out

    def counts(self) -> dict[int, dict[str, int]]:
        """For each study the number of trials of each state (``COMPLETE``, ...)."""
        with self.errors():
            trials = {
                study._study_id: self.storage.get_all_trials(study._study_id, deepcopy=False)
                for study in self.storage.get_all_studies()
            }
        return {study_id: dict(Counter(trial.state.name for trial in found)) for study_id, found in trials.items()}

    def sweep(self, study_ids: Sequence[int], older_than_s: float, reason: str) -> int:
        """Fails trials that were left RUNNING; returns how many.

        Of a trial with a heartbeat (Optuna's ``heartbeat_interval``) that tells: it is failed once it is
        silent, and left alone as long as it beats. One without is failed where it has been RUNNING for
        ``older_than_s`` seconds.
        """
        before = datetime.now() - timedelta(seconds=older_than_s)
        swept = 0
        counts = self.counts()
        with self.errors():
            for study_id in (one for one in study_ids if counts.get(one, {}).get(TrialState.RUNNING.name)):
                running = self.storage.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
                silent_s = self.silent_s([trial._trial_id for trial in running])
                for trial in running:
                    start, silent = _naive(trial.datetime_start), silent_s.get(trial._trial_id)
                    if (start is None or start <= before) if silent is None else silent > SILENT_S:
                        with suppress(UpdateFinishedTrialError):  # another process was faster
                            self.storage.set_trial_user_attr(trial._trial_id, "reason", reason)
                            swept += self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        return swept

    def silent_s(self, trial_ids: Sequence[int]) -> dict[int, float]:
        """Seconds since the last heartbeat of each of these trials that has one."""
        return {}


def packed_part(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a trial's attributes those that hold the packed measurement."""
    return {key: value for key, value in attrs.items() if key == PACKED or key.startswith(PACKED + ".")}


def frozen_trial(row: TrialRow) -> FrozenTrial:
    """A finished trial as Optuna's."""
    trial = create_trial(
        state=TrialState[row.state],
        value=row.value,
        params=dict(row.params),
        distributions={name: PARAMETERS[name].distribution(value) for name, value in row.params.items()},
        user_attrs=dict(row.user_attrs),
        system_attrs={"constraints": [row.constraint]},
        intermediate_values=dict(enumerate(row.rounds)),
    )
    trial.datetime_start, trial.datetime_complete = row.start, row.complete
    return trial


def _naive(when: datetime | None) -> datetime | None:
    """Local time without a zone, as Optuna's versions differ in what they give."""
    return when if when is None or when.tzinfo is None else when.astimezone().replace(tzinfo=None)
