"""Optuna's journal file: an append-only log, for file systems where SQLite's locks do not work."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from moeopt.errors import StorageError
from moeopt.storage.backend import Backend
from moeopt.storage.codec import TrialRow
from moeopt.storage.retry import TransientError
from moeopt.storage.url import StorageUrl

_log = logging.getLogger(__name__)
_TAIL: Final = 1 << 16


class _BatchingFile(JournalFileBackend):
    """A journal file that can take several records under one lock and one fsync."""

    def __init__(self, path: str) -> None:
        self._mutex = JournalFileSymlinkLock(path)
        super().__init__(path, self._mutex)
        self._batch = threading.local()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        file: BinaryIO | None = getattr(self._batch, "file", None)
        if file is None:
            super().append_logs(logs)
        else:
            file.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())
            file.flush()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Within it this thread's records are appended without an fsync each; at the end there is one."""
        self._mutex.acquire()
        try:
            with Path(self._file_path).open("ab") as self._batch.file:
                yield
                os.fsync(self._batch.file.fileno())
        finally:
            self._batch.file = None
            self._mutex.release()


class JournalBackend(Backend):
    """A journal file."""

    def __init__(self, url: StorageUrl) -> None:
        assert url.path is not None
        self._url = url
        self._path = url.path
        with self.errors():
            repair(self._path)
            self._file = _BatchingFile(str(self._path))
            super().__init__(JournalStorage(self._file))

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise StorageError(
                f"{self._url.display} cannot be written ({error.strerror}): give a --storage that can"
            ) from None
        except OSError as error:
            raise TransientError(f"the journal {self._url.display} cannot be used now: {error.strerror}") from None
        except (ValueError, KeyError, AssertionError) as error:
            raise StorageError(f"{self._url.display} is not an Optuna journal ({error}): move it away") from None

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self.errors(), self._file.batch():
            yield

    def add_trials(self, rows: Sequence[tuple[int, TrialRow]], *, retry: bool = False) -> None:
        if retry:
            with self.errors():
                repair(self._path)
        super().add_trials(rows, retry=retry)


def repair(path: Path) -> int:
    """Cuts a journal back to its last whole line; returns the bytes cut.

    A process killed in the middle of a write leaves half a line. The next append would join it,
    and the journal could never be read again.

    Raises:
        OSError: The file cannot be read or written.
    """
    if not path.exists() or path.stat().st_size == 0 or _ends_whole(path):
        return 0
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        if _ends_whole(path):  # the half line was another process's write under way
            return 0
        with path.open("r+b") as file:
            size = end = file.seek(0, os.SEEK_END)
            keep = 0
            while end > 0 and keep == 0:
                start = max(0, end - _TAIL)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                keep = start + newline + 1 if newline >= 0 else 0
                end = start
            file.seek(0)
            if keep == 0 and file.read(1) != b"{":
                raise StorageError(f"{path} is not an Optuna journal: move it away, or give another --storage")
            file.truncate(keep)
            os.fsync(file.fileno())
    finally:
        lock.release()
    _log.warning("%s: cut %d bytes of a line that was not written to its end", path, size - keep)
    return size - keep


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
