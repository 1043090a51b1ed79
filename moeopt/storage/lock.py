"""One run at a time per study key in one database file."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Final

from moeopt.errors import StorageError

_SLOT: Final = 16  # bytes of the lock file per key: the holder's process id
_SLOTS: Final = 4096
_POLL_S: Final = 0.1


class RunLock:
    """A lock on one key of one database file, held until closed or until the process ends, however it ends.

    The lock file beside the database has a slot for each key, locked as a range of an open file
    description: the kernel frees it at kill -9, and two stores of one process exclude each other, too.
    """

    def __init__(self, database: Path, digest: str) -> None:
        self._database = database
        self._path = database.with_name(database.name + ".run")
        self._slot = int(digest, 16) % _SLOTS
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    def acquire(self, title: str, wait_s: float) -> None:
        """Takes the lock.

        Args:
            title: What is locked, for the message.
            wait_s: How long to wait for another run to end.

        Raises:
            StorageError: Another run holds it.
        """
        if self.held:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(f"cannot write {self._path} ({error.strerror}): give another --storage") from None
        deadline = time.monotonic() + wait_s
        while not self._try(fd):
            if time.monotonic() >= deadline:
                pid = os.pread(fd, _SLOT, self._slot * _SLOT).strip(b"\0 ").decode(errors="replace")
                os.close(fd)
                raise StorageError(
                    f"another run{f' (process {pid})' if pid else ''} is tuning {title} in "
                    f"{self._database}: wait for it to end, or give another --storage"
                )
            time.sleep(_POLL_S)
        os.pwrite(fd, str(os.getpid()).encode().ljust(_SLOT), self._slot * _SLOT)
        self._fd = fd

    def _try(self, fd: int) -> bool:
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, self._slot * _SLOT, _SLOT, 0)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        """Lets go of the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
