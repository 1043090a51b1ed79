"""Old files, unpacked where a test may change them."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import run as run
from tests.storage.conftest import postgres as postgres

DATA = Path(__file__).parent / "data"
Unpack = Callable[..., Path]


def old_json(name: str) -> Any:
    """A JSON file of ``data/``."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """Puts files of ``data/`` into the test's directory, those that end in .db.gz and .journal.gz unpacked."""

    def put(*names: str) -> Path:
        for name in names:
            packed = DATA / f"{name}.gz"
            if packed.exists():
                (tmp_path / name).write_bytes(gzip.decompress(packed.read_bytes()))
            else:
                shutil.copy(DATA / name, tmp_path / name)
        return tmp_path / names[-1]

    return put


@pytest.fixture
def slow_recordings(tmp_path: Path) -> None:
    """Puts both recordings into the test's directory, ten times slower: what is timed anew shows in every result."""
    for name in ("recording.jsonl.gz", "wide.jsonl.gz"):
        header, *rows = gzip.decompress((DATA / name).read_bytes()).decode().splitlines()
        lines = [header, *(json.dumps(_slower(json.loads(row))) for row in rows)]
        (tmp_path / name).write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))


def _slower(row: dict[str, Any]) -> dict[str, Any]:
    for role in ("up", "down"):
        if role in row:
            times = row[role]["us"]
            row[role]["us"] = {m: [10 * us for us in values] for m, values in times.items()}
    return row
