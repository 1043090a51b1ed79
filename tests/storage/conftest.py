"""Databases for the storage tests: files, and real PostgreSQL and MariaDB servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeopt.core.trial import Measurement
from moeopt.storage.store import StudyKey
from moeopt.testing.suites.storage import KEY, made_up

from .mariadb import MariaServer
from .server import PostgresServer

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaServer]:
    server = MariaServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


SERVERS = [pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mysql)]


@pytest.fixture(params=["sqlite", "journal", *SERVERS])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/studies.db"
    if request.param == "journal":
        return f"journal://{tmp_path}/studies.journal"
    return _new_database(request)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> PostgresServer | MariaServer:
    """A running database server, of each kind."""
    running: PostgresServer | MariaServer = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def server_url(server: PostgresServer | MariaServer) -> str:
    """The URL of an empty database on it."""
    return server.create_database(f"test{next(_numbers)}")


def _new_database(request: pytest.FixtureRequest) -> str:
    running: PostgresServer | MariaServer = request.getfixturevalue(request.param)
    return running.create_database(f"test{next(_numbers)}")


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    return postgres.create_database(f"test{next(_numbers)}")


@pytest.fixture
def key() -> StudyKey:
    return KEY


@pytest.fixture
def measurements() -> Callable[[int], list[Measurement]]:
    """Makes measurements of all kinds, over several cells."""
    return made_up
