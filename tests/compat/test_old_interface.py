"""Commands, options and public names of commit 6261dc7 are there and mean the same; more may have come."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import moeopt
from moeopt.cli import build_app
from tests.cli.conftest import Run

from .conftest import DATA, Unpack, old_json
from .interface import command_table, signature
from .stored import exact

LOGS = Path(__file__).parents[1] / "data/logs"


@pytest.mark.parametrize("command", list(old_json("commands.json")))
def test_commands(command: str) -> None:
    old, new = old_json("commands.json")[command], command_table(build_app())[command]
    assert new["arguments"] == old["arguments"]
    assert {name: new["options"].get(name) for name in old["options"]} == old["options"]


def test_public_names(unpack: Unpack) -> None:
    old = old_json("names.json")
    assert set(old["names"]) <= set(moeopt.__all__)
    for name, before in old["signatures"].items():
        now = signature(getattr(moeopt, name))
        positional = [part for part in before if part[1] == "POSITIONAL_OR_KEYWORD"]
        assert now[: len(positional)] == positional, name
        assert [part for part in before if part not in now] == [], name
    result = moeopt.load(str(unpack("finished.db")))
    some = {"TuneResult": result, "BatchResult": result.best(64), "RoleResult": result.best(64).up}
    for name, value in some.items():
        assert isinstance(value, getattr(moeopt, name))
        assert [attr for attr in old["attributes"][name] if not hasattr(value, attr)] == []


@pytest.mark.parametrize("number", range(len(old_json("doctor.json"))))
def test_doctor(number: int, run: Run, tmp_path: Path) -> None:
    old = old_json("doctor.json")[number]
    shutil.copytree(DATA / "finished-files", tmp_path / "finished-files")
    for log in LOGS.glob("*.log"):
        shutil.copy(log, tmp_path)
    done = run("doctor", *old["args"], "--json")
    assert done.returncode == old["status"], done.stderr
    new = json.loads(done.stdout.replace(f"{tmp_path}/", "OUT/"))
    assert set(new) == set(old["answer"])
    assert exact(_for_programs(new)) == exact(_for_programs(old["answer"]))


def _for_programs(answer: dict[str, Any]) -> dict[str, Any]:
    """Without the sentences, and without the numbers that a command has by hand since it tunes what the log names."""
    commands = [re.sub(r" --experts \d+ --intermediate \d+", "", command) for command in answer["next"]]
    findings = [{**finding, "message": ""} for finding in answer["findings"]]
    return {**answer, "verdict": {**answer["verdict"], "text": ""}, "findings": findings, "next": commands}


def test_a_folder_of_suggestions_is_known(unpack: Unpack, run: Run, tmp_path: Path) -> None:
    unpack("recording.jsonl.gz")
    shutil.copytree(DATA / "suggested", tmp_path / "suggested")
    done = run("tune", "--gpu", "recorded:recording.jsonl.gz", "--storage", "x.db", "--export", "sglang:suggested")
    assert done.returncode == 2
    assert "unmeasured" in done.stderr
    done = run(
        "suggest", "suggested", "--experts", "8", "--top-k", "2", "--hidden", "256", "--intermediate", "128", "--dtype",
        "bf16", "--gpu", "NVIDIA H200", "--batch-sizes", "1,64", "--triton", "3.6.0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    new, old = json.loads((tmp_path / "suggested/UNMEASURED.json").read_text()), old_json("suggested/UNMEASURED.json")
    assert new["measured"] is False
    assert (new["gpu"], new["shape"]) == (old["gpu"], old["shape"])
    assert _keys(new["batch_sizes"]) == _keys(old["batch_sizes"])


def _keys(value: Any) -> Any:
    return {key: _keys(part) for key, part in value.items()} if isinstance(value, dict) else None
