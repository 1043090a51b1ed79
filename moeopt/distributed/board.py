"""Shared jobs of a tune in a database server, and a device that times them together with others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from moeopt.core.trial import Cell
from moeopt.distributed.claims import LEASE_S, JobBoard
from moeopt.distributed.shared import SharedDevice
from moeopt.measure.base import Device
from moeopt.storage.codec import TrialContext
from moeopt.storage.key import StudyKey
from moeopt.storage.rdb import RdbBackend
from moeopt.storage.store import StudyStore


def job_board(store: StudyStore, key: StudyKey, *, lease_s: float = LEASE_S) -> JobBoard:
    """The shared jobs of a key's cells in a database server.

    Args:
        store: The database.
        key: The key.
        lease_s: Seconds after which others take over the claims of this process, once it is silent.

    Raises:
        StorageError: It is a file, or the database is away.
    """
    store.require_shared()
    assert isinstance(store.backend, RdbBackend)  # what a server's is
    return JobBoard(store.backend, store.study_ids(key), lease_s=lease_s)


def share(
    store: StudyStore, device: Device, key: StudyKey, run: str, first_seq: int = 0
) -> AbstractContextManager[Device]:
    """A device whose jobs any worker may take; with a database file the device itself.

    What it yields is in the database already: the key's writers pass over it.

    Args:
        store: The database.
        device: What this process times with; stays open at the end.
        key: The key, whose cells have been loaded.
        run: Tag of the run.
        first_seq: Number of its first trial.
    """
    if not store.shared:
        return nullcontext(device)

    def context(cell: Cell) -> TrialContext:
        return store.trial_context(key, cell)

    board, stored, elsewhere = job_board(store, key), store.in_database.add, store.timed_elsewhere.add
    return SharedDevice(device, board, run, first_seq, context, stored, elsewhere)
