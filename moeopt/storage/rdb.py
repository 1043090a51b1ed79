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
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from optuna.distributions import distribution_to_json
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy import bindparam, delete, func, insert, or_, select, update
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
from moeopt.storage.backend import Backend, Packed
from moeopt.storage.codec import PACKED, TrialRow, repack, unpack
from moeopt.storage.retry import CONFLICT_S, ConflictError, TransientError, retrying
from moeopt.storage.tables import (
    ATTRS,
    DIRECTIONS,
    FINITE,
    FINITE_ROUND,
    HEARTBEATS,
    PARAMS,
    ROUNDS,
    STUDIES,
    STUDY_ATTRS,
    STUDY_SYSTEM_ATTRS,
    SYSTEM_ATTRS,
    TRIALS,
    VALUES,
    local_time,
    stored_time,
)
from moeopt.storage.url import StorageUrl, redact

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

# An attribute as the rows that hold it: (key, value, keys that are there) -> rows.
_Parts = Callable[[str, Any, set[str]], dict[str, Any]]


class RdbBackend(Backend):
    """A relational database that is already open."""

    storage: RDBStorage

    def __init__(self, storage: RDBStorage, url: StorageUrl) -> None:
        super().__init__(storage)
        self._url = url
        self.engine = storage.engine

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except StorageInternalError as error:
            raise translate(error.__cause__ or error, self._url) from None
        except SQLAlchemyError as error:
            raise translate(error, self._url) from None

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A transaction."""
        with self.errors(), self.engine.begin() as connection:
            yield connection

    def close(self) -> None:
        self.storage.remove_session()
        self.engine.dispose()

    def lock_studies(self, connection: Connection, study_ids: Sequence[int]) -> None:
        """Serialises writers of these studies, as numbers of trials are counted; ordered, so no deadlock."""
        if self._url.kind == "server":
            connection.execute(
                select(STUDIES.c.study_id)
                .where(STUDIES.c.study_id.in_(study_ids))
                .order_by(STUDIES.c.study_id)
                .with_for_update()
            ).all()
        else:
            # Takes SQLite's write lock before anything is read.
            connection.execute(update(STUDIES).where(STUDIES.c.study_id == study_ids[0]).values(study_id=study_ids[0]))

    def ensure_studies(self, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        return retrying(CONFLICT_S, ConflictError)(self._ensure, wanted)

    def _ensure(self, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        names = STUDIES.c.study_name
        query = select(names, STUDIES.c.study_id).where(names.in_(list(wanted)))
        with self.begin() as connection:
            there: dict[str, int] = {row[0]: row[1] for row in connection.execute(query)}
            missing = [name for name in wanted if name not in there]
            if not missing:
                return there
            connection.execute(insert(STUDIES), [{"study_name": name} for name in missing])
            ids: dict[str, int] = {row[0]: row[1] for row in connection.execute(query)}
            direction = {"direction": StudyDirection.MINIMIZE, "objective": 0}
            connection.execute(insert(DIRECTIONS), [{"study_id": ids[name], **direction} for name in missing])
            _replace(connection, STUDY_ATTRS, {ids[name]: wanted[name] for name in missing}, repack)
        return ids

    def set_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        retrying(CONFLICT_S, ConflictError)(self._set, STUDY_ATTRS, attrs, repack)

    def set_system_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        retrying(CONFLICT_S, ConflictError)(self._set, STUDY_SYSTEM_ATTRS, attrs, _as_it_is)

    def _set(self, table: Table, attrs: Mapping[int, Mapping[str, Any]], parts: _Parts) -> None:
        if attrs:
            with self.begin() as connection:
                self.lock_studies(connection, sorted(attrs))
                _replace(connection, table, attrs, parts)

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
            select(ATTRS.c.trial_id)
            .join(TRIALS, TRIALS.c.trial_id == ATTRS.c.trial_id)
            .where(
                TRIALS.c.study_id == study_id,
                ATTRS.c.key == key,
                ATTRS.c.value_json == json.dumps(value),
            )
        )
        return found.first() is not None

    def insert_trials(self, connection: Connection, rows: Sequence[tuple[int, TrialRow]]) -> None:
        """Adds finished trials within a transaction."""
        study_ids = sorted({study_id for study_id, _ in rows})
        self.lock_studies(connection, study_ids)
        numbers: dict[int, int] = dict.fromkeys(study_ids, 0)
        count = select(TRIALS.c.study_id, func.count()).where(TRIALS.c.study_id.in_(study_ids))
        numbers.update({row[0]: row[1] for row in connection.execute(count.group_by(TRIALS.c.study_id))})
        trials = []
        for study_id, row in rows:
            trials.append(
                {
                    "number": numbers[study_id],
                    "study_id": study_id,
                    "state": TrialState[row.state],
                    "datetime_start": stored_time(row.start),
                    "datetime_complete": stored_time(row.complete),
                }
            )
            numbers[study_id] += 1
        of_trials = zip(self._insert_returning(connection, trials), (row for _, row in rows), strict=True)
        new: dict[Table, list[dict[str, Any]]] = defaultdict(list)
        for trial_id, row in of_trials:
            for table, of_trial in _rows_of(row):
                new[table] += [{"trial_id": trial_id, **one} for one in of_trial]
        for table, of_table in new.items():
            if of_table:
                connection.execute(insert(table), of_table)

    def _insert_returning(self, connection: Connection, trials: list[dict[str, Any]]) -> list[int]:
        if self.engine.dialect.insert_executemany_returning_sort_by_parameter_order:
            statement = insert(TRIALS).returning(TRIALS.c.trial_id, sort_by_parameter_order=True)
            return list(connection.execute(statement, trials).scalars())
        return [
            key[0]
            for trial in trials
            if (key := connection.execute(insert(TRIALS), trial).inserted_primary_key) is not None
        ]

    def packed(self, study_ids: Sequence[int]) -> dict[int, list[Packed]]:
        out: dict[int, list[Packed]] = {study_id: [] for study_id in study_ids}
        if not study_ids:
            return out
        query = (
            select(TRIALS.c.study_id, TRIALS.c.trial_id, TRIALS.c.datetime_complete, ATTRS.c.key, ATTRS.c.value_json)
            .join(ATTRS, ATTRS.c.trial_id == TRIALS.c.trial_id)
            .where(
                TRIALS.c.study_id.in_(study_ids),
                TRIALS.c.state.in_((TrialState.COMPLETE, TrialState.PRUNED)),
                or_(ATTRS.c.key == PACKED, ATTRS.c.key.like(PACKED + ".%")),
            )
            .order_by(TRIALS.c.trial_id)
        )
        with self.begin() as connection:
            found = connection.execute(query).all()
        for (study_id, _, ended), parts in itertools.groupby(found, key=lambda row: row[:3]):
            value = unpack(PACKED, {row.key: json.loads(row.value_json) for row in parts})
            if isinstance(value, dict):
                out[study_id].append((value, local_time(ended)))
        return out

    def counts(self) -> dict[int, dict[str, int]]:
        out: dict[int, dict[str, int]] = defaultdict(dict)
        query = select(TRIALS.c.study_id, TRIALS.c.state, func.count()).group_by(TRIALS.c.study_id, TRIALS.c.state)
        with self.begin() as connection:
            for study_id, state, number in connection.execute(query):
                out[study_id][state.name] = number
        return out

    def silent_s(self, trial_ids: Sequence[int]) -> dict[int, float]:
        beats = HEARTBEATS.c
        # A heartbeat is written, and so compared, by the server's clock.
        query = select(beats.trial_id, beats.heartbeat, func.current_timestamp()).where(beats.trial_id.in_(trial_ids))
        with self.begin() as connection:
            return {trial_id: _seconds(beat, now) for trial_id, beat, now in connection.execute(query)}


def _rows_of(row: TrialRow) -> Iterator[tuple[Table, list[dict[str, Any]]]]:
    """A trial as rows of the tables beside that of the trials, still without its id."""
    yield (
        PARAMS,
        [
            {"param_name": name, "param_value": float(value), "distribution_json": _distribution_json(name, value)}
            for name, value in row.params.items()
        ],
    )
    if row.value is not None:
        yield VALUES, [{"objective": 0, "value": row.value, "value_type": FINITE}]
    yield (
        ROUNDS,
        [
            {"step": step, "intermediate_value": us, "intermediate_value_type": FINITE_ROUND}
            for step, us in enumerate(row.rounds)
        ],
    )
    yield ATTRS, [{"key": key, "value_json": json.dumps(value)} for key, value in row.user_attrs.items()]
    yield SYSTEM_ATTRS, [{"key": "constraints", "value_json": json.dumps([row.constraint])}]


def _as_it_is(key: str, value: Any, there: set[str]) -> dict[str, Any]:
    return {key: value}


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


def translate(error: BaseException, url: StorageUrl) -> StorageError:
    """A database's error as one of ours: one line, no password."""
    cause = getattr(error, "orig", None) or error
    message = redact(" ".join(str(cause).split()), url.url)
    if "readonly" in message or "read-only" in message:
        return StorageError(f"{url.display} is read-only ({message}): give a --storage that can be written")
    if "not a database" in message or "malformed" in message:
        return StorageError(f"{url.display} is damaged or not a database ({message}): restore or move it away")
    if isinstance(error, IntegrityError):
        return ConflictError(f"{url.display} refused a row ({message})")
    if isinstance(error, OperationalError | InterfaceError | InternalError) or _is_lost(error):
        return TransientError(f"the database {url.display} cannot be used now: {message}")
    return StorageError(f"{url.display}: {message}")


def _is_lost(error: BaseException) -> bool:
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, PoolTimeoutError)


@lru_cache(maxsize=4096)
def _distribution_json(name: str, value: int | bool) -> str:
    return distribution_to_json(PARAMETERS[name].distribution(value))


def _seconds(earlier: datetime, later: datetime | str) -> float:
    """Seconds between two times of the server's clock; SQLite gives the later one as text."""
    if isinstance(later, str):
        later = datetime.fromisoformat(later)
    return (later.replace(tzinfo=None) - earlier.replace(tzinfo=None)).total_seconds()
