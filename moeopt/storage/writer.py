"""The one writer of a run: a thread that stores measurements in batches, beside the measuring."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from datetime import datetime
from itertools import islice
from typing import Any, Final

from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import StorageError
from moeopt.storage.backend import Backend, TransientError
from moeopt.storage.codec import TrialContext, TrialRow, encode

_log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.4  # at most so much is lost when the process is killed
_BATCH: Final = 500
_FIRST_DELAY_S: Final = 0.1
_LAST_DELAY_S: Final = 5.0


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
            self._thread.join(timeout=_LAST_DELAY_S)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _work(self) -> None:
        delay = 0.0
        while True:
            with self._changed:
                if delay:
                    self._changed.wait_for(lambda: self._closing or self._retry_now, timeout=delay)
                    self._retry_now = False
                else:
                    self._changed.wait_for(self._is_urgent, timeout=_INTERVAL_S)
                batch = list(islice(self._queue, _BATCH))
                attrs = list(self._attrs)
                if self._closing and (delay or not (batch or attrs)):
                    return
            if not batch and not attrs:
                continue
            try:
                if attrs:
                    self._backend.set_attrs(_merged(attrs))
                self._backend.add_trials([self._row(*item) for item in batch], retry=delay > 0)
            except TransientError as error:
                delay = min(max(_FIRST_DELAY_S, 2 * delay), _LAST_DELAY_S)
                if self._away is None:
                    _log.warning("%s; measurements are held, trying again", error)
                self._away = str(error)
                continue
            except StorageError as error:
                self._lost = error
                return
            if self._away is not None:
                _log.warning("the database is back: held measurements are being stored")
            with self._changed:
                self._away, delay = None, 0.0
                self._stored += len(batch)
                del self._attrs[: len(attrs)]
                for _ in batch:
                    self._queue.popleft()
                self._changed.notify_all()

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
