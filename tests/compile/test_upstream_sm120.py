"""The config files that SGLang and vLLM ship for SM120 parts: all legal by our rule, and they compile.

``benchmarks/results/upstream-sm120.json`` holds what became of every one of them in the compiler.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.upstream_sm120 import compile_files, engine_kernel, illegal
from tests.sm120_files import ShippedFile, shipped_files

pytestmark = [pytest.mark.network, pytest.mark.slow]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "upstream-sm120.json"


@pytest.fixture(scope="module")
def files() -> list[ShippedFile]:
    return list(shipped_files())


def test_there_are_as_many_as_we_know(files: list[ShippedFile]) -> None:
    assert sum(f.engine == "sglang" for f in files) >= 7
    assert sum(f.engine == "vllm" for f in files) >= 8


def test_every_shipped_config_is_legal(files: list[ShippedFile]) -> None:
    broken = [f"{file.label} {line}" for file in files for line in illegal(file, engine_kernel(file.engine))]
    assert broken == []


def test_all_were_compiled_once(files: list[ShippedFile]) -> None:
    """The committed result is of these very files, and none of their configs failed."""
    results = json.loads(RESULTS.read_text())
    assert {f["file"]: f["configs"] for f in results["files"]} == {f.label: len(f.configs) for f in files}
    assert [line for f in results["files"] for line in f["failed"]] == []
    assert results["distinct_binaries"] > 300


def test_a_sample_compiles(files: list[ShippedFile], tmp_path: Path) -> None:
    """A config of each engine and scheme, with the engine's own kernel."""
    found, distinct = compile_files(files, tmp_path, 1, keep=1)
    assert [line for failed, _, _ in found.values() for line in failed] == []
    assert distinct >= 7
