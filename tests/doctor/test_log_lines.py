"""Log lines of thirty-eight releases: what the doctor reads in each."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from moeopt.doctor.scan import scan
from tests.doctor.log_lines import TABLE, log_lines
from tests.wheels import SGLANG, SGLANG_VERSIONS, VLLM, VLLM_VERSIONS, engine_source

ROWS: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))


def test_the_table_covers_the_releases_of_both_engines() -> None:
    released = {(row["engine"], version) for row in ROWS for version in row["versions"]}
    assert {engine: sum(e == engine for e, _ in released) for engine in ("sglang", "vllm")} == {
        "sglang": 20,
        "vllm": 20,
    }
    assert {("sglang", SGLANG), ("vllm", VLLM)} <= released


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['engine']} {row['text'][:60]}" for row in ROWS])
def test_each_line_is_read_as_what_it_means(row: dict[str, Any]) -> None:
    prefix = {"sglang": "[2026-01-01 00:00:00 TP0] ", "vllm": "(EngineCore pid=2) INFO 01-01 00:00:00 [x.py:1] "}
    line = f"{prefix[row['engine']]}{row['example']}\n"
    kinds = {event.kind for event in scan(io.BytesIO(line.encode())).events if event.engine in ("", row["engine"])}
    assert kinds == ({row["kind"]} if row["kind"] is not None else set())


@pytest.mark.network
@pytest.mark.parametrize(
    ("engine", "version"), [*(("sglang", v) for v in SGLANG_VERSIONS), *(("vllm", v) for v in VLLM_VERSIONS)]
)
def test_the_table_has_the_lines_of_the_published_release(engine: str, version: str) -> None:
    known = {row["text"] for row in ROWS if row["engine"] == engine and version in row["versions"]}
    assert log_lines(engine_source(engine, version)) == known
