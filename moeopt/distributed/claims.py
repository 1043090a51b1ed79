"""Jobs that several processes share through a database server, each timed once.

A tune posts what it wants timed; it and any worker claim jobs of one cell at a time, time them, and
store trials and claims in one transaction. A claim is a lease: a process that dies stops renewing it,
and the job goes back. What no living tune wants is not claimed.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from sqlalchemy import (
    Column,
    Double,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    and_,
    bindparam,
    func,
    insert,
    select,
    text,
    update,
)

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import StorageError
from moeopt.storage.codec import PACKED, StoredTrial, TrialContext, decode, encode, unpack
from moeopt.storage.rdb import RdbBackend
from moeopt.storage.retry import CONFLICT_S, ConflictError, retrying

if TYPE_CHECKING:
    from sqlalchemy import Connection

LEASE_S: Final = 30.0
_WAITING, _CLAIMED, _DONE = 0, 1, 2

_metadata = MetaData()
_JOBS = Table(
    "moeopt_jobs",
    _metadata,
    Column("job_id", Integer, primary_key=True),
    Column("study_id", Integer, nullable=False),
    Column("config", String(200), nullable=False),
    Column("run", String(64), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("state", Integer, nullable=False, index=True),
    Column("wanted_until", Double, nullable=False),
    Column("owner", String(120)),
    Column("claimed_until", Double),
    Column("result", Text),
    UniqueConstraint("study_id", "config"),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this process is to time.

    Attributes:
        job_id: Its row.
        study_id: The cell's study.
        job: What to time.
        run: Tag of the run that posted it.
        seq: Its number in that run.
    """

    job_id: int
    study_id: int
    job: Job
    run: str
    seq: int


class JobBoard:
    """The shared jobs of one database, as one process sees them.

    All methods raise TransientError where the database is away.
    """

    def __init__(self, backend: RdbBackend, cells: Mapping[int, Cell], *, lease_s: float = LEASE_S) -> None:
        """Makes the table where it is not there.

        Args:
            backend: A database server.
            cells: The studies (Optuna's id) whose jobs this process deals with.
            lease_s: Seconds after which the claim of a silent process goes back.
        """
        self._backend = backend
        self.cells: dict[int, Cell] = {}
        self._ids: dict[Cell, int] = {}
        self.add_cells(cells)
        self.lease_s = lease_s
        self._next_look = 0.0
        self._ask_clock_at = 0.0
        self._ahead = 0.0
        self.owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        try:
            with backend.begin() as connection:
                _metadata.create_all(connection)
        except StorageError:
            # Another process made it at the same moment: then it is there now.
            with backend.begin() as connection:
                connection.execute(select(_JOBS.c.job_id).limit(1))

    def add_cells(self, cells: Mapping[int, Cell]) -> None:
        """Deals with the jobs of these studies, too."""
        self.cells.update(cells)
        self._ids.update({cell: study_id for study_id, cell in cells.items()})

    def post(self, jobs: Sequence[Job], run: str, first_seq: int) -> dict[int, Job]:
        """Asks for jobs; those that were asked for before, by any run, are not asked for again.

        Returns:
            The row of each job.
        """
        return retrying(CONFLICT_S, ConflictError)(self._post, jobs, run, first_seq)

    def _post(self, jobs: Sequence[Job], run: str, first_seq: int) -> dict[int, Job]:
        wanted = {(self._ids[job.cell], config_text(job.config)): job for job in jobs}
        with self._backend.begin() as connection:
            found = self._rows(connection, wanted)
            until = self._now(connection) + self.lease_s
            new = [
                {
                    "study_id": study_id,
                    "config": config,
                    "run": run,
                    "seq": first_seq + number,
                    "state": _WAITING,
                    "wanted_until": until,
                }
                for number, (study_id, config) in enumerate(wanted)
                if (study_id, config) not in found
            ]
            if new:
                connection.execute(insert(_JOBS), new)
                found = self._rows(connection, wanted)
            return {job_id: wanted[where] for where, job_id in found.items()}

    def _rows(self, connection: Connection, wanted: Mapping[tuple[int, str], Job]) -> dict[tuple[int, str], int]:
        query = select(_JOBS.c.study_id, _JOBS.c.config, _JOBS.c.job_id).where(
            _JOBS.c.study_id.in_({study_id for study_id, _ in wanted}),
            _JOBS.c.config.in_({config for _, config in wanted}),
        )
        rows = ((row.study_id, row.config, row.job_id) for row in connection.execute(query))
        return {(study_id, config): job_id for study_id, config, job_id in rows if (study_id, config) in wanted}

    def claim(self, limit: int) -> list[Claim]:
        """Takes waiting jobs of one cell; the more wait, the more, up to the limit."""
        if not self.cells:
            return []
        with self._backend.begin() as connection:
            now = self._now(connection)
            if now > self._next_look:
                self._give_back_expired(connection, now)
                self._next_look = now + self.lease_s / 4
            free = (_JOBS.c.state == _WAITING) & _JOBS.c.study_id.in_(list(self.cells)) & (_JOBS.c.wanted_until >= now)
            first = connection.execute(
                select(_JOBS.c.study_id).where(free).order_by(_JOBS.c.job_id).limit(1).with_for_update(skip_locked=True)
            ).scalar()
            if first is None:
                return []
            waiting = connection.execute(select(func.count()).select_from(_JOBS).where(free)).scalar() or 1
            rows = connection.execute(
                select(_JOBS)
                .where(free, _JOBS.c.study_id == first)
                .order_by(_JOBS.c.job_id)
                .limit(min(limit, -(-waiting // 4)))
                .with_for_update(skip_locked=True)
            ).all()
            if rows:
                connection.execute(
                    update(_JOBS)
                    .where(_JOBS.c.job_id.in_([row.job_id for row in rows]))
                    .values(state=_CLAIMED, owner=self.owner, claimed_until=now + self.lease_s)
                )
        return [
            Claim(row.job_id, row.study_id, Job(self.cells[row.study_id], config_of(row.config)), row.run, row.seq)
            for row in rows
        ]

    def _give_back_expired(self, connection: Connection, now: float) -> None:
        expired = connection.execute(
            select(_JOBS.c.job_id)
            .where(_JOBS.c.state == _CLAIMED, _JOBS.c.claimed_until < now)
            .with_for_update(skip_locked=True)
        ).scalars()
        ids = list(expired)
        if ids:
            connection.execute(
                update(_JOBS).where(_JOBS.c.job_id.in_(ids)).values(state=_WAITING, owner=None, claimed_until=None)
            )

    def complete(
        self, done: Sequence[tuple[Claim, Measurement, datetime, datetime]], context: Callable[[Cell], TrialContext]
    ) -> int:
        """Stores trials and ends their claims in one transaction.

        A claim that has meanwhile gone to another process is left to that one.

        Args:
            done: Claims, what was measured, and from when to when.
            context: For the readable attributes.

        Returns:
            How many were stored.
        """
        if not done:
            return 0
        by_id = {claim.job_id: (claim, measurement, start, end) for claim, measurement, start, end in done}
        with self._backend.begin() as connection:
            mine = connection.execute(
                select(_JOBS.c.job_id)
                .where(_JOBS.c.job_id.in_(list(by_id)), _JOBS.c.owner == self.owner, _JOBS.c.state == _CLAIMED)
                .order_by(_JOBS.c.job_id)
                .with_for_update()
            ).scalars()
            kept = [by_id[job_id] for job_id in mine]
            if not kept:
                return 0
            rows = [(c.study_id, encode(m, c.run, c.seq, context(c.job.cell), start, end)) for c, m, start, end in kept]
            self._backend.insert_trials(connection, rows)
            results = [
                {"id": claim.job_id, "packed": json.dumps(unpack(PACKED, row.user_attrs))}
                for (claim, *_), (_, row) in zip(kept, rows, strict=True)
            ]
            new = {"state": _DONE, "result": bindparam("packed"), "claimed_until": None}
            connection.execute(update(_JOBS).where(_JOBS.c.job_id == bindparam("id")).values(new), results)
        return len(kept)

    def results(self, outstanding: Mapping[int, Job]) -> dict[int, StoredTrial]:
        """Of these rows, those that are done."""
        if not outstanding:
            return {}
        query = select(_JOBS.c.job_id, _JOBS.c.result).where(
            _JOBS.c.job_id.in_(list(outstanding)), _JOBS.c.state == _DONE
        )
        with self._backend.begin() as connection:
            rows = connection.execute(query).all()
        return {row.job_id: decode(outstanding[row.job_id].cell, json.loads(row.result)) for row in rows}

    def renew(self, wanted: Sequence[int]) -> None:
        """Says that this process lives: renews its claims, and its request for these rows."""
        with self._backend.begin() as connection:
            now = self._now(connection)
            mine = and_(_JOBS.c.owner == self.owner, _JOBS.c.state == _CLAIMED)
            for which, column in ((mine, "claimed_until"), (_JOBS.c.job_id.in_(wanted), "wanted_until")):
                # Rows that are locked are being claimed or completed just now; to wait could be a deadlock.
                query = select(_JOBS.c.job_id).where(which).with_for_update(skip_locked=True)
                ids = list(connection.execute(query).scalars())
                if ids:
                    new = update(_JOBS).where(_JOBS.c.job_id.in_(ids)).values({column: now + self.lease_s})
                    connection.execute(new)

    def release(self) -> int:
        """Gives back all claims of this process; returns how many."""
        with self._backend.begin() as connection:
            mine = and_(_JOBS.c.owner == self.owner, _JOBS.c.state == _CLAIMED)
            given = connection.execute(update(_JOBS).where(mine).values(state=_WAITING, owner=None, claimed_until=None))
            return int(given.rowcount)

    def _now(self, connection: Connection) -> float:
        """The server's clock, as workers' clocks may differ; asked for now and then."""
        local = time.monotonic()
        if local > self._ask_clock_at:
            self._ahead = self._ask_clock(connection) - time.monotonic()
            self._ask_clock_at = local + self.lease_s / 4
        return time.monotonic() + self._ahead

    def _ask_clock(self, connection: Connection) -> float:
        clock = "UNIX_TIMESTAMP(NOW(6))" if connection.dialect.name in ("mysql", "mariadb") else None
        return float(
            connection.execute(text(f"SELECT {clock or 'extract(epoch from clock_timestamp())'}")).scalar_one()
        )


def config_text(config: LaunchConfig) -> str:
    """A config as a short string, one for each."""
    return json.dumps(config.numbers(), separators=(",", ":"))


def config_of(text_: str) -> LaunchConfig:
    """The inverse of :func:`config_text`."""
    return LaunchConfig.of_numbers(json.loads(text_))
