"""Optuna's tables, for what its own interface does in many statements.

The one place that knows the private module of Optuna that declares them; tests/storage/test_tables.py
says whether a new Optuna has changed what is used here.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from optuna.storages._rdb import models

if TYPE_CHECKING:
    from sqlalchemy import Table

STUDIES: Final[Table] = models.StudyModel.__table__
DIRECTIONS: Final[Table] = models.StudyDirectionModel.__table__
STUDY_ATTRS: Final[Table] = models.StudyUserAttributeModel.__table__
STUDY_SYSTEM_ATTRS: Final[Table] = models.StudySystemAttributeModel.__table__
TRIALS: Final[Table] = models.TrialModel.__table__
PARAMS: Final[Table] = models.TrialParamModel.__table__
VALUES: Final[Table] = models.TrialValueModel.__table__
ROUNDS: Final[Table] = models.TrialIntermediateValueModel.__table__
ATTRS: Final[Table] = models.TrialUserAttributeModel.__table__
SYSTEM_ATTRS: Final[Table] = models.TrialSystemAttributeModel.__table__
HEARTBEATS: Final[Table] = models.TrialHeartbeatModel.__table__
# Types of a value and of an intermediate value that are numbers.
FINITE: Final = models.TrialValueModel.TrialValueType.FINITE
FINITE_ROUND: Final = models.TrialIntermediateValueModel.TrialIntermediateValueType.FINITE
# Optuna 5 stores naive UTC, Optuna 4 naive local time.
STORES_UTC: Final = hasattr(models.TrialModel, "_datetime_start_utc")


def stored_time(local: datetime) -> datetime:
    """A local time as Optuna stores it."""
    return local.astimezone(UTC).replace(tzinfo=None) if STORES_UTC else local


def local_time(stored: datetime | None) -> datetime | None:
    """The inverse of :func:`stored_time`."""
    if stored is None or not STORES_UTC:
        return stored
    return stored.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
