"""The one writer of a run: a thread that stores measurements in batches, beside the measuring."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final

from tenacity import RetryCallState

from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import StorageError
from moeopt.storage.backend import Backend
from moeopt.storage.codec import TrialContext, TrialRow, encode
from moeopt.storage.retry import LAST_DELAY_S, TransientError, retrying, saying

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.4  # at most so much is lost when the process is killed
_BATCH: Final = 500


class TrialWriter:
    """Stores finished trials; ``put`` never waits for the database.

    A database that goes away is tried again with growing delays, and measurements are held
    meanwhile. What cannot be stored by the end is said by :meth:`close`.
    """

    def __init__(
        self,
        backend: Backend,
        studies: Mapping[Cell, int],
        context: Callable[[Cell], TrialContext],
        *,
        skip: Container[Job] = frozenset(),
        give_up_s: float = 60.0,
    ) -> None:
        """Starts the thread.

        Args:
            backend: The database.
            studies: Optuna's study id of each cell.
            context: What the readable attributes of a cell are computed from.
            skip: Jobs whose trials are in the database already.
            give_up_s: How long :meth:`flush` and :meth:`close` wait for a database that is away.
        """
        self._backend = backend
        self._studies = studies
        self._context = context
        self._skip = skip
        self._give_up_s = give_up_s
        self._queue: deque[tuple[Cell, Measurement, str, int, datetime, datetime]] = deque()
        self._attrs: list[tuple[int, dict[str, Any]]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._flushing = False
        self._retry_now = False
        self._ended = False
        self._lost: StorageError | None = None
        self._away: str | None = None
        self._stored = 0
        self._last = datetime.now()
        self._thread = threading.Thread(target=self._run, name="moeopt-writer", daemon=True)
        self._thread.start()

    @property
    def stored(self) -> int:
        """How many trials are in the database by now."""
        return self._stored

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._closing or self._ended

    @property
    def away(self) -> str | None:
        """Why the database cannot be written just now, or None."""
        return self._away

    def put(self, cell: Cell, measurement: Measurement, run: str, seq: int) -> None:
        """Hands over a measurement; returns at once.

        Args:
            cell: Whose study it goes to.
            measurement: What was measured.
            run: Tag of the run.
            seq: Its number in the run.

        Raises:
            StorageError: The database has refused an earlier one for good.
        """
        if self._lost is not None:
            raise self._lost
        if cell not in self._studies:
            raise StorageError(f"no study was opened for {cell.role} M={cell.batch_size}: load it first")
        if measurement.job in self._skip:
            return
        now = datetime.now()
        with self._changed:
            self._queue.append((cell, measurement, run, seq, self._last, now))
            self._last = now
            if len(self._queue) >= _BATCH:
                self._changed.notify_all()

    def put_attrs(self, study_id: int, attrs: Mapping[str, Any]) -> None:
        """Hands over user attributes of a study; they are stored before any trial that is put later."""
        with self._changed:
            self._attrs.append((study_id, dict(attrs)))

    def flush(self) -> None:
        """Waits until all that was put is in the database.

        Raises:
            StorageError: It was refused, or the database was away for too long.
        """
        waiting_since = time.monotonic()
        with self._changed:
            self._flushing = self._retry_now = True
            self._changed.notify_all()
            while (self._queue or self._attrs) and not self._ended:
                self._changed.wait(0.2)
                if self._away is None:
                    waiting_since = time.monotonic()
                elif time.monotonic() - waiting_since > self._give_up_s:
                    break
            self._flushing = False
            left = len(self._queue) + len(self._attrs)
        if self._lost is not None:
            raise self._lost
        if left:
            raise StorageError(
                f"{left} measurements could not be stored ({self._away or 'the writer has ended'}): the result holds "
                "them, the database does not"
            )

    def close(self) -> None:
        """Stores what is left and ends the thread. May be called more than once.

        Raises:
            StorageError: Something could not be stored.
        """
        try:
            if not self._closing:
                self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join(timeout=LAST_DELAY_S)

    def _run(self) -> None:
        try:
            self._work()
        except TransientError as error:  # closed while the database was away: flush has said so
            _log.debug("%s", error)
        except StorageError as error:
            self._lost = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._is_urgent, timeout=_INTERVAL_S)
                batch, attrs = list(islice(self._queue, _BATCH)), list(self._attrs)
                if self._closing and not batch and not attrs:
                    return
            if batch or attrs:
                self._store(_merged(attrs), [self._row(*item) for item in batch])
                with self._changed:
                    self._stored += len(batch)
                    del self._attrs[: len(attrs)]
                    for _ in batch:
                        self._queue.popleft()
                    self._changed.notify_all()

    def _store(self, attrs: Mapping[int, Mapping[str, Any]], rows: Sequence[tuple[int, TrialRow]]) -> None:
        """Stores until it succeeds, or until the writer is closed."""
        patiently = retrying(math.inf).copy(
            stop=lambda state: self._closing, sleep=self._pause, before_sleep=self._note_away
        )
        for attempt in patiently:
            with attempt:
                if attrs:
                    self._backend.set_attrs(attrs)
                if rows:
                    self._backend.add_trials(rows, retry=attempt.retry_state.attempt_number > 1)
        if self._away is not None:
            _log.warning("the database is back: held measurements are being stored")
            self._away = None

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._retry_now, timeout=seconds)
            self._retry_now = False

    def _note_away(self, state: RetryCallState) -> None:
        saying("measurements are held, trying again")(state)
        self._away = str(state.outcome.exception()) if state.outcome is not None else None

    def _is_urgent(self) -> bool:
        return self._closing or len(self._queue) >= _BATCH or (self._flushing and bool(self._queue or self._attrs))

    def _row(
        self, cell: Cell, measurement: Measurement, run: str, seq: int, start: datetime, complete: datetime
    ) -> tuple[int, TrialRow]:
        return self._studies[cell], encode(measurement, run, seq, self._context(cell), start, complete)


def _merged(attrs: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    out: dict[int, dict[str, Any]] = {}
    for study_id, values in attrs:
        out.setdefault(study_id, {}).update(values)
    return out
