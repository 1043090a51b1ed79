"""Interface of a study database, which a relational and a journal one implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from moeopt.errors import StorageError
from moeopt.storage.codec import StudyRow, TrialRow

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


# What was packed into a trial's attributes, and when the trial ended (local time).
Packed = tuple[Mapping[str, Any], datetime | None]


class TransientError(StorageError):
    """The database is away, locked or full: what was not stored may be stored later."""


class Backend(ABC):
    """A database of Optuna studies, with bulk operations that Optuna's own interface lacks.

    Any method raises :class:`TransientError` where trying again may help, and StorageError where not.
    """

    @property
    @abstractmethod
    def storage(self) -> BaseStorage:
        """Optuna's storage over the same data."""

    @abstractmethod
    def studies(self) -> list[StudyRow]:
        """All studies, with their user attributes."""

    @abstractmethod
    def ensure_studies(self, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """Creates the studies (name -> user attributes) that are not there; returns the ids of all."""

    @abstractmethod
    def set_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        """Sets user attributes of studies (id -> attributes), long ones split."""

    @abstractmethod
    def set_system_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        """Sets system attributes of studies (id -> attributes), as they are."""

    @abstractmethod
    def add_trials(self, rows: Sequence[tuple[int, TrialRow]], *, retry: bool = False) -> None:
        """Adds finished trials (study id, trial), all or none.

        Args:
            rows: What to add.
            retry: An earlier call with the same rows failed, perhaps after the database had taken them.
        """

    @abstractmethod
    def packed(self, study_ids: Sequence[int]) -> dict[int, list[Packed]]:
        """For each study the packed attribute of each finished trial and when it ended, oldest first."""

    @abstractmethod
    def counts(self) -> dict[int, dict[str, int]]:
        """For each study the number of trials of each state (``COMPLETE``, ...)."""

    @abstractmethod
    def sweep(self, study_ids: Sequence[int], older_than_s: float, reason: str) -> int:
        """Fails trials that were left RUNNING; returns how many.

        Of a trial with a heartbeat (Optuna's ``heartbeat_interval``) that tells: it is failed once it is
        silent, and left alone as long as it beats. One without is failed where it has been RUNNING for
        ``older_than_s`` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of all connections and files."""
