"""Device whose jobs are shared with workers through the study database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from datetime import datetime
from typing import Final

from tenacity import Retrying

from moeopt.core.trial import Cell, Job, Measurement, Race, never_stop
from moeopt.distributed.claims import Claim, JobBoard
from moeopt.errors import StorageError
from moeopt.measure.base import Device, WrappedDevice
from moeopt.storage.codec import TrialContext
from moeopt.storage.retry import TransientError, retrying

_log = logging.getLogger(__name__)

_POLL_S: Final = (0.01, 0.25)
_STORE_EVERY_S: Final = 0.3
_CHUNK: Final = 16


class Heartbeat:
    """Renews this process's leases and requests from a thread, until closed."""

    def __init__(self, board: JobBoard) -> None:
        self._board = board
        self._end = threading.Event()
        self.wanted: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._work, name="moeopt-heartbeat", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._end.wait(self._board.lease_s / 3):
            try:
                self._board.renew(self.wanted)
            except StorageError as error:
                _log.debug("heartbeat: %s", error)

    def close(self) -> None:
        self._end.set()
        self._thread.join(timeout=5.0)


class ClaimedJobs:
    """Times claimed jobs on a device and stores what comes, in batches."""

    def __init__(
        self, board: JobBoard, device: Device, context: Callable[[Cell], TrialContext], retry: Retrying
    ) -> None:
        self._board = board
        self._device = device
        self._context = context
        self._retry = retry
        self._done: list[tuple[Claim, Measurement, datetime, datetime]] = []
        self.timed: set[Job] = set()

    @property
    def unsaved(self) -> list[Measurement]:
        """What was timed and could not be stored."""
        return [measurement for _, measurement, _, _ in self._done]

    def run_some(self, race: Race = never_stop) -> int:
        """Claims jobs, times and stores them.

        A database that goes away in between is waited for at the end: what was timed is held.

        Args:
            race: The race, where the jobs are this process's own.

        Returns:
            How many were timed; 0 where none waits.
        """
        claims = self._retry(self._board.claim, _CHUNK)
        if not claims:
            return 0
        by_job = {claim.job: claim for claim in claims}
        stored_at, begun = time.monotonic(), datetime.now()
        try:
            with closing(self._device.measure([claim.job for claim in claims], race)) as results:
                for measurement in results:
                    now = datetime.now()
                    self.timed.add(measurement.job)
                    self._done.append((by_job[measurement.job], measurement, begun, now))
                    begun = now
                    if time.monotonic() - stored_at > _STORE_EVERY_S:
                        with suppress(TransientError):
                            self._store()
                        stored_at = time.monotonic()
        except BaseException:
            with suppress(TransientError):
                self._store()
                self._board.release()  # of what was not timed: else it is this process's for as long as it lives
            raise
        self._retry(self._store)
        return len(claims)

    def _store(self) -> None:
        stored = self._board.complete(self._done, self._context)
        if stored < len(self._done):
            _log.warning("%d claims had gone to another process: its measurements count", len(self._done) - stored)
        self._done.clear()


class SharedDevice(WrappedDevice):
    """Posts jobs for all to claim, claims like the others, and yields what anyone measured."""

    def __init__(
        self,
        device: Device,
        board: JobBoard,
        run: str,
        first_seq: int,
        context: Callable[[Cell], TrialContext],
        stored: Callable[[Job], object],
        elsewhere: Callable[[Job], object] = lambda job: None,
        *,
        give_up_s: float = 60.0,
    ) -> None:
        """
        Args:
            device: What this process times with.
            board: The shared jobs.
            run: Tag of the run.
            first_seq: Number of its first trial.
            context: For the readable attributes of trials.
            stored: Told of each job whose trial is in the database already.
            elsewhere: Told of each of them that another process has timed.
            give_up_s: How long to wait for a database that is away.
        """
        super().__init__(device)
        self._board = board
        self._run = run
        self._seq = first_seq
        self._stored = stored
        self._elsewhere = elsewhere
        self._retry = retrying(give_up_s)
        self._jobs = ClaimedJobs(board, device, context, self._retry)
        self._heartbeat = Heartbeat(board)

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        """Times jobs, here and wherever a worker has joined; ``race`` holds for those timed here.

        Raises:
            StorageError: The database went away and did not come back; all that was timed here has been yielded.
        """
        if not jobs:
            return
        outstanding = self._retry(self._board.post, jobs, self._run, self._seq)
        self._seq += len(jobs)
        self._heartbeat.wanted = tuple(outstanding)
        delay = _POLL_S[0]
        try:
            while outstanding:
                timed = self._jobs.run_some(race)
                results = self._retry(self._board.results, outstanding)
                for job_id, trial in sorted(results.items()):
                    del outstanding[job_id]
                    self._stored(trial.measurement.job)
                    if trial.measurement.job not in self._jobs.timed:
                        self._elsewhere(trial.measurement.job)
                    yield trial.measurement
                self._heartbeat.wanted = tuple(outstanding)
                if timed or results:
                    delay = _POLL_S[0]
                elif outstanding:
                    time.sleep(delay)
                    delay = min(2 * delay, _POLL_S[1])
        except StorageError:
            yield from self._jobs.unsaved
            raise
        finally:
            self._heartbeat.wanted = ()

    def close(self) -> None:
        """Ends the heartbeat and gives claims back; the device is its owner's to close."""
        self._heartbeat.close()
        try:
            self._board.release()
        except StorageError as error:
            _log.debug("release: %s", error)
