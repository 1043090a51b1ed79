"""URLs of study databases: what a user may write, and how it is shown without its password."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from moeopt.errors import StorageError

Kind = Literal["sqlite", "server", "journal", "other"]

# The driver to use where a URL names none, and what brings it.
_DRIVERS: Final = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_EXTRAS: Final = {"postgresql": "moeopt[postgres]", "mysql": "moeopt[mysql]"}
_EXPECTED: Final = "give a path, sqlite:///PATH, postgresql://..., mysql://... or journal://PATH"


@dataclass(frozen=True)
class StorageUrl:
    """A parsed storage URL.

    Attributes:
        kind: ``sqlite``: a file with one writer; ``server``: PostgreSQL or MySQL; ``journal``: Optuna's journal file;
            ``other``: a backend that the caller has opened.
        url: For SQLAlchemy, password included: never show it.
        path: The file of ``sqlite`` and ``journal``.
        display: What may be shown and logged.
        extra: What to install where the driver is missing.
    """

    kind: Kind
    url: str
    path: Path | None
    display: str
    extra: str = ""

    def __repr__(self) -> str:
        return f"StorageUrl({self.display!r})"

    @classmethod
    def parse(cls, text: str | Path) -> StorageUrl:
        """Reads what a user gave.

        Raises:
            StorageError: It is not the URL of a database that can be used.
        """
        text = str(text).strip()
        if not text:
            raise StorageError(f"the storage URL is empty: {_EXPECTED}")
        scheme, separator, rest = text.partition("://")
        if not separator:
            if text.startswith("sqlite:"):
                raise StorageError(f"storage {text!r} is not a SQLite URL: write sqlite:///PATH")
            return _file(text)
        if scheme == "journal":
            return _journal(Path(rest))
        if scheme == "file":
            return _file(rest)
        dialect = scheme.partition("+")[0]
        if dialect == "sqlite":
            path = rest.removeprefix("/").partition("?")[0]
            if not rest.startswith("/") or path in ("", ":memory:"):
                raise StorageError(f"storage {text!r} names no file: write sqlite:///PATH")
            return _sqlite(Path(path))
        if dialect in ("postgresql", "postgres", "mysql"):
            return _server(_DRIVERS.get(scheme, scheme) + "://" + rest)
        raise StorageError(f"storage scheme {scheme!r} is unknown: {_EXPECTED}")


def redact(text: str, url: str) -> str:
    """The text without the password of the URL."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return text
    text = text.replace(url, parsed.render_as_string(hide_password=True))
    secret = parsed.password
    return text.replace(str(secret), "***") if secret else text


def _file(text: str) -> StorageUrl:
    path = Path(text).expanduser()
    if path.suffix in (".journal", ".log"):
        return _journal(path)
    return _sqlite(path)


def _sqlite(path: Path) -> StorageUrl:
    path = path.expanduser().absolute()
    return StorageUrl("sqlite", f"sqlite:///{path}", path, str(path))


def _journal(path: Path) -> StorageUrl:
    if not path.name:
        raise StorageError("the journal URL names no file: write journal://PATH")
    path = path.expanduser().absolute()
    return StorageUrl("journal", f"journal://{path}", path, str(path))


def _server(url: str) -> StorageUrl:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The message would repeat the URL, password and all.
        raise StorageError(
            "the storage URL cannot be read: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with special "
            "characters of the password as %XX"
        ) from None
    if not parsed.database:
        shown = parsed.render_as_string(hide_password=True)
        raise StorageError(f"storage {shown} names no database: write {parsed.get_backend_name()}://HOST/DATABASE")
    shown = parsed.set(drivername=parsed.get_backend_name()).render_as_string(hide_password=True)
    return StorageUrl("server", url, None, shown, _EXTRAS.get(parsed.get_backend_name(), ""))
