"""Databases for the storage tests: files, and real PostgreSQL and MariaDB servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Failure, Job, Measurement, Resources
from moeopt.storage.store import StudyKey

from .mariadb import MariaServer
from .server import PostgresServer

_numbers = itertools.count()
SHAPE = MoEShape(256, 8, 3072, 256)
CELLS = (Cell("up", 2), Cell("down", 2), Cell("up", 64), Cell("down", 64))


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
    return StudyKey(
        SHAPE, "NVIDIA H200", Provenance("", "builtin", "0.1.0", "0123456789abcdef", "3.6.0", "2.11.0", "570.86")
    )


@pytest.fixture
def measurements() -> Callable[[int], list[Measurement]]:
    """Makes measurements of all kinds, over several cells."""
    return make_measurements


def make_measurements(count: int) -> list[Measurement]:
    configs = SearchSpace.grid(SHAPE).configs()
    return [_measurement(number, configs[(number * 37) % len(configs)]) for number in range(count)]


def _measurement(number: int, config: LaunchConfig) -> Measurement:
    cell = CELLS[number % len(CELLS)]
    job = Job(cell, config)
    resources = {cell.roles[0]: Resources(128 + number % 64, number % 3, 98304, 0.1 * number)}
    match number % 6:
        case 0:
            return Measurement(
                job, "failed", failure=Failure("compile", 'µ PassManager::run "failed"\\' * 200, "a.log")
            )
        case 1:
            return Measurement(job, "raced_out", (1 / 3 + number,), 1.7e-3, resources)
        case 2:
            return Measurement(job, "rejected", (), None, resources, Failure("constraints", "spills 4,096 bytes"))
        case 3:
            failure = Failure("correctness", "error inf against the reference")
            return Measurement(job, "failed", (), float("inf"), resources, failure, {"clock": 1980})
    us = tuple((number + 1) * 1.1**i / 7 for i in range(5))
    return Measurement(job, "ok", us, 0.00171 + number / 3e6, resources, None, {"clock": 1980, "disturbed": False})
