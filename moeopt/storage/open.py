"""Opening of a study database, with one line on why where it cannot be opened."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any, Final

from moeopt.errors import StorageError
from moeopt.storage.backend import Backend
from moeopt.storage.retry import CONFLICT_S, ConflictError, TransientError, retrying
from moeopt.storage.url import StorageUrl

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_SQLITE_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 10


def open_backend(url: StorageUrl, *, create: bool) -> Backend:
    """Opens a database.

    Args:
        url: Which.
        create: Whether to make it where it is not there.

    Raises:
        StorageError: It cannot be opened; says why and what to do.
    """
    # Optuna says "A new study created" at INFO for each of the 36 studies of a run.
    logging.getLogger("optuna.storages").setLevel(logging.WARNING)
    if url.path is not None:
        _check_file(url, create=create)
    if url.kind == "journal":
        from moeopt.storage.journal import JournalBackend

        return JournalBackend(url)
    return _open_rdb(url)


def _check_file(url: StorageUrl, *, create: bool) -> None:
    path = url.path
    assert path is not None
    if path.is_dir():
        raise StorageError(f"{url.display} is a directory: give the path of a database file in it")
    if path.exists():
        if not os.access(path, os.R_OK | os.W_OK) or not os.access(path.parent, os.W_OK):
            raise StorageError(
                f"{url.display} is read-only or may not be entered: give a --storage that can be written"
            )
        with path.open("rb") as file:
            head = file.read(len(_SQLITE_MAGIC))
        if url.kind == "sqlite" and head and head != _SQLITE_MAGIC:
            raise StorageError(
                f"{url.display} is not a SQLite database: give another path, or journal://PATH for a journal"
            )
        if url.kind == "journal" and head and head[:1] != b"{":
            raise StorageError(f"{url.display} is not an Optuna journal: give another path")
        return
    if not create:
        raise StorageError(f"there is no database {url.display}: give the --storage that the tune was given")
    check_new_file(url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(_no_directory(url, error)) from None


def is_there(path: Path) -> bool:
    """Whether a path exists; what is in a directory that may not be entered counts as not there."""
    try:
        return path.exists()
    except PermissionError:
        return False


def check_new_file(url: StorageUrl) -> None:
    """Says whether the file of a database that is not there can be made, without making anything.

    Raises:
        StorageError: It cannot.
    """
    path = url.path
    assert path is not None
    parent = next(one for one in path.parents if is_there(one))
    if not parent.is_dir():
        raise StorageError(_no_directory(url, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"the directory {parent} is read-only or may not be entered: give a --storage that can be written"
        )


def _no_directory(url: StorageUrl, error: OSError) -> str:
    assert url.path is not None
    return (
        f"cannot make the directory {url.path.parent} ({error.strerror}): give a --storage in one that can be written"
    )


def _open_rdb(url: StorageUrl) -> Backend:
    from optuna.storages import RDBStorage
    from sqlalchemy import event
    from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError

    from moeopt.storage.rdb import RdbBackend, translate

    if url.kind == "sqlite":
        _use_wal(url)
        engine: dict[str, Any] = {"connect_args": {"timeout": _SQLITE_TIMEOUT_S}}
    else:
        engine = {
            "pool_pre_ping": True,
            "connect_args": {"connect_timeout": _CONNECT_TIMEOUT_S},
            # PostgreSQL's default. In MySQL's own, workers that claim jobs side by side lock the gaps between
            # rows, and each other out.
            "isolation_level": "READ COMMITTED",
        }

    def connect() -> RDBStorage:
        try:
            return RDBStorage(url.url, engine_kwargs=engine)
        except ImportError:
            raise StorageError(f"no driver for {url.display} is installed: pip install '{url.extra}'") from None
        except (IntegrityError, ProgrammingError) as error:  # another process makes the tables at the same moment
            raise ConflictError(str(translate(error, url))) from None
        except SQLAlchemyError as error:
            raise translate(error, url) from None
        except RuntimeError as error:  # Optuna's word for another schema
            raise StorageError(f"{url.display}: {_schema_line(str(error))}") from None

    storage = retrying(CONFLICT_S, ConflictError)(connect)
    if url.kind == "sqlite":
        event.listen(storage.engine, "connect", _on_sqlite_connect)
        storage.engine.dispose()
    return RdbBackend(storage, url)


def _schema_line(message: str) -> str:
    if "optuna storage upgrade" in message:
        return "made by an older Optuna; upgrade it with: optuna storage upgrade --storage URL"
    return "made by a newer Optuna than is installed: pip install -U optuna, or give another --storage"


def _use_wal(url: StorageUrl) -> None:
    """Sets the write-ahead log, which stays with the file: readers and the one writer do not wait for each other."""
    try:
        connection = sqlite3.connect(str(url.path), timeout=_SQLITE_TIMEOUT_S)
        try:
            connection.execute("PRAGMA journal_mode=WAL").fetchone()
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):
            raise TransientError(f"the database {url.display} cannot be used now: {error}") from None
        raise StorageError(
            f"{url.display} is damaged or not a database ({error}): restore it, or give another --storage"
        ) from None


def _on_sqlite_connect(connection: Any, record: Any) -> None:
    # FULL: a committed batch outlives a power cut; NORMAL would promise that only up to the last checkpoint.
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
