"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from moeopt.errors import ExportError

logger = logging.getLogger(__name__)


def write_file(path: Path, text: str) -> None:
    """Writes a file and the directories above it.

    Raises:
        ExportError: It cannot be written.
    """
    check_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise ExportError(f"{path} cannot be written ({error.strerror or error}): give another path") from None


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
        raise ExportError(f"{directory} cannot be written ({there} is no directory): give another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ExportError(f"{directory} cannot be written (no permission in {there}): give another one")


def write_atomically(path: Path, text: str) -> None:
    """Writes through a temporary file in the same directory; a crash leaves the old file.

    Raises:
        OSError: The directory cannot be written.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
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
