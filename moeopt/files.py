"""Files that are written whole or not at all, and locks between processes."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from filelock import FileLock, Timeout

from moeopt.errors import ExportError

logger = logging.getLogger(__name__)
_POLL_S: Final = 0.1


def write_file(path: Path, content: str | bytes, *, check: Callable[[Path], object] | None = None) -> None:
    """Writes a file and the directories above it.

    Args:
        path: Where.
        content: Text is written as UTF-8.
        check: Called with the path of the written copy, before it takes the place of an old file.

    Raises:
        ExportError: It cannot be written.
    """
    check_file(path)
    try:
        replace_file(path, content, check=check)
    except OSError as error:
        raise ExportError(f"{path} cannot be written ({error.strerror or error}): give another path") from None


def json_lines(rows: Iterable[Any]) -> bytes:
    """Gzipped JSON lines; the bytes depend on the rows alone."""
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return gzip.compress(text.encode(), mtime=0)


def check_file(path: Path | None) -> None:
    """Finds out before a long run, not after it, that a file cannot be written.

    Args:
        path: The file; None where none is wanted.

    Raises:
        ExportError: It is a directory, or its own directory cannot be made or written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ExportError(f"{path} cannot be written (it is a directory): give the path of a file")
    check_writable(path.parent)


def check_writable(directory: Path) -> None:
    """Finds out before a long run, not after it, that files cannot be written there.

    Raises:
        ExportError: The directory cannot be made or written.
    """
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ExportError(f"{directory} cannot be written ({there} is not a directory): give another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ExportError(f"{directory} cannot be written (no permission in {there}): give another one")


def replace_file(path: Path, content: str | bytes, *, check: Callable[[Path], object] | None = None) -> None:
    """:func:`write_file` with the system's errors; a crash leaves the old file.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)
    logger.info("wrote %s", path)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse to sync a directory; the file itself is synced
        logger.debug("%s cannot be synced", directory)
    finally:
        os.close(descriptor)


class LockFile:
    """A lock that one holder has at a time, until it releases it or its process ends, however it ends.

    Two of one process exclude each other, too. The file holds the holder's process id, and goes with the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path, thread_local=False)

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock.is_locked

    def acquire(self, wait_s: float) -> bool:
        """Takes the lock; False where another has it for ``wait_s`` seconds.

        Raises:
            OSError: The file cannot be made.
        """
        try:
            self._lock.acquire(timeout=wait_s, poll_interval=_POLL_S)
        except Timeout:
            return False
        self.path.write_text(str(os.getpid()))
        return True

    def holder(self) -> str:
        """The process id of another holder; "" where it is not known."""
        with suppress(OSError):
            return self.path.read_text(errors="replace").strip()
        return ""

    def release(self) -> None:
        """Lets go of the lock."""
        if self.held:
            with suppress(OSError):
                self.path.unlink()  # while it is held: who waits for it sees that the file is gone, and makes a new one
            self._lock.release()

    def __enter__(self) -> Self:
        """Takes the lock, however long that may take; without one where the file system knows no locks."""
        try:
            self._lock.acquire(poll_interval=_POLL_S)
        except OSError:
            logger.debug("%s cannot be locked", self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
