"""The examples run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("quickstart.py", ["recorded:h200-E256-top8-K3072-N256-bf16.jsonl.gz"], "_down.json"),
        ("walkthrough.py", [], "report.html"),
    ],
)
def test_example(tmp_path: Path, name: str, arguments: list[str], expected: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
