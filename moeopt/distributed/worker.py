"""A process that joins the tunes of a database server: it times what they ask for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from moeopt.core.trial import Cell
from moeopt.distributed.board import job_board
from moeopt.distributed.claims import LEASE_S, JobBoard
from moeopt.distributed.shared import ClaimedJobs, Heartbeat
from moeopt.errors import StorageError
from moeopt.measure.base import Device
from moeopt.storage.codec import TrialContext
from moeopt.storage.key import StudyKey
from moeopt.storage.retry import retrying
from moeopt.storage.store import StudyStore

_log = logging.getLogger(__name__)
_POLL_S: Final = (0.02, 0.5)
_LOOK_AGAIN_S: Final = 2.0


def find_work(store: StudyStore, gpu: str, idle_s: float) -> StudyKey | None:
    """Waits for an unfinished tune on this kind of GPU; None where none comes within ``idle_s`` seconds.

    Args:
        store: A database server.
        gpu: Name of the GPU that this process has.
        idle_s: How long to wait.
    """
    deadline = time.monotonic() + idle_s
    while True:
        for summary in store.keys():  # noqa: SIM118  (a method of ours, no dict)
            key = summary.key
            if key.gpu == gpu and not key.provenance.recorded and any(not run.finished for run in store.runs(key)):
                return key
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_AGAIN_S)
        store.refresh()


class Worker:
    """Times jobs of one device's key, in both modes, until there is nothing left to do."""

    def __init__(self, store: StudyStore, device: Device, *, lease_s: float = LEASE_S, give_up_s: float = 60.0) -> None:
        """
        Args:
            store: A database server.
            device: What to time with.
            lease_s: Seconds after which others take over the claims of a worker that died.
            give_up_s: How long to wait for a database that is away.

        Raises:
            StorageError: The database is a file.
        """
        self._store = store
        self._device = device
        self._retry = retrying(give_up_s)
        self._keys = tuple(StudyKey.of(device, mode) for mode in ("split", "joint"))
        self._board: JobBoard = job_board(store, self._keys[0], lease_s=lease_s)
        self._context: dict[Cell, TrialContext] = {}
        self.timed = 0

    def run(self, idle_s: float, progress: Callable[[int], None] = lambda timed: None) -> int:
        """Works until no job of its key has come for ``idle_s`` seconds.

        Args:
            idle_s: How long to wait for jobs.
            progress: Told of how many were timed in all.

        Returns:
            How many were timed.

        Raises:
            StorageError: The database went away and did not come back.
        """
        jobs = ClaimedJobs(self._board, self._device, self._context_of, self._retry)
        heartbeat = Heartbeat(self._board)
        busy_at, delay, looked_at = time.monotonic(), _POLL_S[0], 0.0
        try:
            while True:
                now = time.monotonic()
                if now - looked_at > _LOOK_AGAIN_S:
                    self._retry(self._look)
                    looked_at = now
                done = jobs.run_some()
                self.timed += done
                if done:
                    busy_at, delay = time.monotonic(), _POLL_S[0]
                    progress(self.timed)
                    continue
                if time.monotonic() - busy_at > idle_s:
                    return self.timed
                time.sleep(delay)
                delay = min(2 * delay, _POLL_S[1])
        finally:
            heartbeat.close()
            try:
                self._board.release()
            except StorageError as error:
                _log.debug("release: %s", error)

    def _look(self) -> None:
        """Finds the studies of this key: a tune that starts later brings new ones."""
        self._store.refresh()
        for key in self._keys:
            self._board.add_cells(self._store.study_ids(key))

    def _context_of(self, cell: Cell) -> TrialContext:
        if cell not in self._context:
            key = self._keys[1] if cell.role == "joint" else self._keys[0]
            self._context[cell] = self._store.trial_context(key, cell)
        return self._context[cell]
