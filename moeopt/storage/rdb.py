"""SQLite, PostgreSQL and MySQL, in the tables of Optuna's RDBStorage.

Optuna's own interface writes a trial in some 25 statements and one transaction; here a batch of
trials is six statements and one transaction, in the same tables.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy import bindparam, delete, func, insert, or_, select, text, update
from sqlalchemy.exc import (
    DBAPIError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from moeopt.core.config import PARAMETERS
from moeopt.errors import StorageError
from moeopt.storage.backend import Backend, Packed, TransientError
from moeopt.storage.codec import PACKED, StudyRow, TrialRow, repack, unpack, unpack_all
from moeopt.storage.url import StorageUrl, redact

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

_STUDIES: Table = models.StudyModel.__table__
_DIRECTIONS: Table = models.StudyDirectionModel.__table__
_STUDY_ATTRS: Table = models.StudyUserAttributeModel.__table__
_STUDY_SYSTEM_ATTRS: Table = models.StudySystemAttributeModel.__table__
_TRIALS: Table = models.TrialModel.__table__
_PARAMS: Table = models.TrialParamModel.__table__
_VALUES: Table = models.TrialValueModel.__table__
_ROUNDS: Table = models.TrialIntermediateValueModel.__table__
_ATTRS: Table = models.TrialUserAttributeModel.__table__
_HEARTBEATS: Table = models.TrialHeartbeatModel.__table__
_SYSTEM_ATTRS: Table = models.TrialSystemAttributeModel.__table__
# A process that says that it lives every few seconds, as Optuna's can, is dead after so many without a word.
SILENT_S: Final = 60.0
_FINITE = models.TrialValueModel.TrialValueType.FINITE
_FINITE_ROUND = models.TrialIntermediateValueModel.TrialIntermediateValueType.FINITE
# An attribute as the rows that hold it: (key, value, keys that are there) -> rows.
_Parts = Callable[[str, Any, set[str]], dict[str, Any]]
# Optuna 5 stores naive UTC, Optuna 4 naive local time.
_STORES_UTC = hasattr(models.TrialModel, "_datetime_start_utc")


class RdbBackend(Backend):
    """A relational database that is already open."""

    def __init__(self, storage: RDBStorage, url: StorageUrl) -> None:
        self._storage = storage
        self._url = url
        self.engine = storage.engine
        self._server = url.kind == "server"

    @property
    def storage(self) -> RDBStorage:
        return self._storage

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction; the database's errors come out as ours."""
        try:
            with self.engine.begin() as connection:
                yield connection
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise translate(error, self._url) from None

    def lock_studies(self, connection: Connection, study_ids: Sequence[int]) -> None:
        """Serialises writers of these studies, as numbers of trials are counted; ordered, so no deadlock."""
        if self._server:
            connection.execute(
                select(_STUDIES.c.study_id)
                .where(_STUDIES.c.study_id.in_(study_ids))
                .order_by(_STUDIES.c.study_id)
                .with_for_update()
            ).all()
        else:
            # Takes SQLite's write lock before anything is read.
            connection.execute(
                update(_STUDIES).where(_STUDIES.c.study_id == study_ids[0]).values(study_id=study_ids[0])
            )

    def studies(self) -> list[StudyRow]:
        with self.begin() as connection:
            names = connection.execute(select(_STUDIES.c.study_id, _STUDIES.c.study_name)).all()
            attrs: dict[int, dict[str, Any]] = defaultdict(dict)
            columns = (_STUDY_ATTRS.c.study_id, _STUDY_ATTRS.c.key, _STUDY_ATTRS.c.value_json)
            for study_id, key, value in connection.execute(select(*columns)):
                attrs[study_id][key] = json.loads(value)
        return [StudyRow(study_id, name, unpack_all(attrs[study_id])) for study_id, name in names]

    def ensure_studies(self, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        for attempt in itertools.count():
            try:
                with self.begin() as connection:
                    return self._ensure(connection, wanted)
            except IntegrityError as error:  # another process made one of them at the same moment
                if attempt == 5:
                    raise translate(error, self._url) from None
        raise AssertionError

    def _ensure(self, connection: Connection, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        query = select(_STUDIES.c.study_name, _STUDIES.c.study_id).where(_STUDIES.c.study_name.in_(list(wanted)))
        ids: dict[str, int] = {row[0]: row[1] for row in connection.execute(query)}
        missing = [name for name in wanted if name not in ids]
        if not missing:
            return ids
        connection.execute(insert(_STUDIES), [{"study_name": name} for name in missing])
        ids = {row[0]: row[1] for row in connection.execute(query)}
        connection.execute(
            insert(_DIRECTIONS),
            [{"study_id": ids[n], "direction": StudyDirection.MINIMIZE, "objective": 0} for n in missing],
        )
        rows = [
            {"study_id": ids[name], "key": part, "value_json": json.dumps(value)}
            for name in missing
            for key, whole in wanted[name].items()
            for part, value in repack(key, whole, ()).items()
        ]
        if rows:
            connection.execute(insert(_STUDY_ATTRS), rows)
        return ids

    def set_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        self._set(_STUDY_ATTRS, attrs, repack)

    def set_system_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        self._set(_STUDY_SYSTEM_ATTRS, attrs, lambda key, value, there: {key: value})

    def _set(self, table: Table, attrs: Mapping[int, Mapping[str, Any]], parts: _Parts) -> None:
        if not attrs:
            return
        for attempt in range(2):
            try:
                with self.begin() as connection:
                    self.lock_studies(connection, sorted(attrs))
                    _replace(connection, table, attrs, parts)
                return
            except IntegrityError as error:  # a writer that does not lock the study, such as the dashboard
                if attempt:
                    raise translate(error, self._url) from None

    def add_trials(self, rows: Sequence[tuple[int, TrialRow]], *, retry: bool = False) -> None:
        if not rows:
            return
        with self.begin() as connection:
            if retry and self._is_there(connection, *rows[0]):
                return
            self.insert_trials(connection, rows)

    def _is_there(self, connection: Connection, study_id: int, row: TrialRow) -> bool:
        key, value = next((k, v) for k, v in row.user_attrs.items() if k.startswith(PACKED))
        found = connection.execute(
            select(_ATTRS.c.trial_id)
            .join(_TRIALS, _TRIALS.c.trial_id == _ATTRS.c.trial_id)
            .where(_TRIALS.c.study_id == study_id, _ATTRS.c.key == key, _ATTRS.c.value_json == json.dumps(value))
        )
        return found.first() is not None

    def insert_trials(self, connection: Connection, rows: Sequence[tuple[int, TrialRow]]) -> None:
        """Adds finished trials within a transaction."""
        study_ids = sorted({study_id for study_id, _ in rows})
        self.lock_studies(connection, study_ids)
        numbers: dict[int, int] = dict.fromkeys(study_ids, 0)
        count = select(_TRIALS.c.study_id, func.count()).where(_TRIALS.c.study_id.in_(study_ids))
        numbers.update({row[0]: row[1] for row in connection.execute(count.group_by(_TRIALS.c.study_id))})
        trials = []
        for study_id, row in rows:
            trials.append(
                {
                    "number": numbers[study_id],
                    "study_id": study_id,
                    "state": TrialState[row.state],
                    "datetime_start": _stored_time(row.start),
                    "datetime_complete": _stored_time(row.complete),
                }
            )
            numbers[study_id] += 1
        ids = self._insert_returning(connection, trials)
        params, values, rounds, attrs, constraints = [], [], [], [], []
        for trial_id, (_, row) in zip(ids, rows, strict=True):
            for name, value in row.params.items():
                params.append(
                    {
                        "trial_id": trial_id,
                        "param_name": name,
                        "param_value": float(value),
                        "distribution_json": _distribution_json(name, value),
                    }
                )
            if row.value is not None:
                values.append({"trial_id": trial_id, "objective": 0, "value": row.value, "value_type": _FINITE})
            for step, us in enumerate(row.rounds):
                rounds.append(
                    {
                        "trial_id": trial_id,
                        "step": step,
                        "intermediate_value": us,
                        "intermediate_value_type": _FINITE_ROUND,
                    }
                )
            for key, attr in row.user_attrs.items():
                attrs.append({"trial_id": trial_id, "key": key, "value_json": json.dumps(attr)})
            constraints.append({"trial_id": trial_id, "key": "constraints", "value_json": f"[{row.constraint}]"})
        tables = (_PARAMS, params), (_VALUES, values), (_ROUNDS, rounds), (_ATTRS, attrs), (_SYSTEM_ATTRS, constraints)
        for table, new in tables:
            if new:
                connection.execute(insert(table), new)

    def _insert_returning(self, connection: Connection, trials: list[dict[str, Any]]) -> list[int]:
        if self.engine.dialect.insert_executemany_returning_sort_by_parameter_order:
            statement = insert(_TRIALS).returning(_TRIALS.c.trial_id, sort_by_parameter_order=True)
            return list(connection.execute(statement, trials).scalars())
        return [
            key[0]
            for trial in trials
            if (key := connection.execute(insert(_TRIALS), trial).inserted_primary_key) is not None
        ]

    def packed(self, study_ids: Sequence[int]) -> dict[int, list[Packed]]:
        out: dict[int, list[Packed]] = {study_id: [] for study_id in study_ids}
        if not study_ids:
            return out
        query = (
            select(
                _TRIALS.c.study_id, _TRIALS.c.trial_id, _TRIALS.c.datetime_complete, _ATTRS.c.key, _ATTRS.c.value_json
            )
            .join(_ATTRS, _ATTRS.c.trial_id == _TRIALS.c.trial_id)
            .where(
                _TRIALS.c.study_id.in_(study_ids),
                _TRIALS.c.state.in_((TrialState.COMPLETE, TrialState.PRUNED)),
                or_(_ATTRS.c.key == PACKED, _ATTRS.c.key.like(PACKED + ".%")),
            )
            .order_by(_TRIALS.c.trial_id)
        )
        with self.begin() as connection:
            found = connection.execute(query).all()
        for (study_id, _, ended), parts in itertools.groupby(found, key=lambda row: row[:3]):
            value = unpack(PACKED, {row.key: json.loads(row.value_json) for row in parts})
            if isinstance(value, dict):
                out[study_id].append((value, _local_time(ended)))
        return out

    def counts(self) -> dict[int, dict[str, int]]:
        out: dict[int, dict[str, int]] = defaultdict(dict)
        query = select(_TRIALS.c.study_id, _TRIALS.c.state, func.count()).group_by(_TRIALS.c.study_id, _TRIALS.c.state)
        with self.begin() as connection:
            for study_id, state, number in connection.execute(query):
                out[study_id][state.name] = number
        return out

    def sweep(self, study_ids: Sequence[int], older_than_s: float, reason: str) -> int:
        if not study_ids:
            return 0
        running = (
            select(_TRIALS.c.trial_id, _TRIALS.c.datetime_start, _HEARTBEATS.c.heartbeat, func.current_timestamp())
            .outerjoin(_HEARTBEATS, _HEARTBEATS.c.trial_id == _TRIALS.c.trial_id)
            .where(_TRIALS.c.study_id.in_(study_ids), _TRIALS.c.state == TrialState.RUNNING)
        )
        before = _stored_time(datetime.now() - timedelta(seconds=older_than_s))
        with self.begin() as connection:
            ids = [
                trial_id
                for trial_id, start, beat, now in connection.execute(running)
                # A heartbeat is written, and so compared, by the server's clock.
                if (_seconds(beat, now) > SILENT_S if beat is not None else start is None or start <= before)
            ]
            if not ids:
                return 0
            self.lock_studies(connection, sorted(study_ids))
            connection.execute(
                update(_TRIALS)
                .where(_TRIALS.c.trial_id.in_(ids), _TRIALS.c.state == TrialState.RUNNING)
                .values(state=TrialState.FAIL, datetime_complete=_stored_time(datetime.now()))
            )
            connection.execute(delete(_ATTRS).where(_ATTRS.c.trial_id.in_(ids), _ATTRS.c.key == "reason"))
            connection.execute(
                insert(_ATTRS), [{"trial_id": i, "key": "reason", "value_json": json.dumps(reason)} for i in ids]
            )
        return len(ids)

    def ping(self) -> None:
        """Raises where the database does not answer."""
        with self.begin() as connection:
            connection.execute(text("SELECT 1"))

    def close(self) -> None:
        self._storage.remove_session()
        self.engine.dispose()


def _replace(connection: Connection, table: Table, attrs: Mapping[int, Mapping[str, Any]], parts: _Parts) -> None:
    there: defaultdict[int, set[str]] = defaultdict(set)
    for row in connection.execute(select(table.c.study_id, table.c.key).where(table.c.study_id.in_(list(attrs)))):
        there[row[0]].add(row[1])
    rows, old = [], []
    for study_id, values in attrs.items():
        for key, whole in values.items():
            for part, value in parts(key, whole, there[study_id]).items():
                rows.append({"study_id": study_id, "key": part, "value_json": json.dumps(value)})
                if part in there[study_id]:
                    old.append({"id": study_id, "old": part})
    if old:
        match = (table.c.study_id == bindparam("id")) & (table.c.key == bindparam("old"))
        connection.execute(delete(table).where(match), old)
    if rows:
        connection.execute(insert(table), rows)


def translate(error: Exception, url: StorageUrl) -> Exception:
    """A database's error as one of ours: one line, no password."""
    cause = getattr(error, "orig", None) or error
    message = redact(" ".join(str(cause).split()), url.url)
    if "readonly" in message or "read-only" in message:
        return StorageError(f"{url.display} is read-only ({message}): give a --storage that can be written")
    if "not a database" in message or "malformed" in message:
        return StorageError(f"{url.display} is damaged or not a database ({message}): restore or move it away")
    if isinstance(error, IntegrityError):
        return StorageError(f"{url.display} refused a row ({message})")
    if isinstance(error, OperationalError | InterfaceError | InternalError) or _is_lost(error):
        return TransientError(f"the database {url.display} cannot be used now: {message}")
    return StorageError(f"{url.display}: {message}")


def _is_lost(error: Exception) -> bool:
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, PoolTimeoutError)


_json_cache: dict[tuple[str, int | bool], str] = {}


def _distribution_json(name: str, value: int | bool) -> str:
    known = _json_cache.get((name, value))
    if known is None:
        known = _json_cache[name, value] = distribution_to_json(PARAMETERS[name].distribution(value))
    return known


def _stored_time(local: datetime) -> datetime:
    return local.astimezone(UTC).replace(tzinfo=None) if _STORES_UTC else local


def _seconds(earlier: datetime, later: datetime | str) -> float:
    """Seconds between two times of the server's clock; SQLite gives the later one as text."""
    if isinstance(later, str):
        later = datetime.fromisoformat(later)
    return (later.replace(tzinfo=None) - earlier.replace(tzinfo=None)).total_seconds()


def _local_time(stored: datetime | None) -> datetime | None:
    if stored is None or not _STORES_UTC:
        return stored
    return stored.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
