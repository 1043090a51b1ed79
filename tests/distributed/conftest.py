"""One Ray cluster for all tests that need one: it takes longer to start than any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moeopt.recordings.format import Recording
from tests.storage.conftest import key, mariadb, postgres, postgres_url, server, server_url  # noqa: F401  (fixtures)

from .executors import RayExecutor


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExecutor]:
    executor = RayExecutor(tmp_path_factory.mktemp("caches"))
    yield executor
    executor.close()


@pytest.fixture
def cluster(started: RayExecutor) -> RayExecutor:
    """A Ray cluster of two nodes, a killed one replaced."""
    started.restore()
    return started


@pytest.fixture
def path(tiny_recording: Callable[..., Path]) -> Path:
    return tiny_recording()


@pytest.fixture
def recording(path: Path) -> Recording:
    return Recording.load(path)
