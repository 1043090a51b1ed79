"""``moeopt models`` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moeopt.cli.models import register
from moeopt.errors import InvalidInputError

DATA = Path(__file__).parents[1] / "data" / "models"


def run(*arguments: str) -> str:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table() -> None:
    text = run()
    assert "GLM-5" in text and "Qwen3_5MoeForConditionalGeneration" in text
    rows = json.loads(run("--json"))
    assert any(row["family"] == "Mixtral" and row["experts"].startswith("num_local_experts") for row in rows)


def test_a_model_and_its_keys() -> None:
    text = run(str(DATA / "glm-5.json"), "--tp", "8")
    assert "E=257,N=256" in text and "moe_intermediate_size = 2048, / 8 (tp)" in text
    answer = json.loads(run(str(DATA / "glm-5.json"), "--tp", "8", "--no-fuse-shared", "--json"))
    assert answer["shape"]["num_experts"] == 256 and answer["shape"]["intermediate_size"] == 256


def test_by_hand() -> None:
    text = run(str(DATA / "gpt-oss-120b.json"), "--dtype", "fp8_w8a8", "--block-shape", "64,64", "--top-k", "2")
    assert "given by hand (--top-k)" in text and "block_shape [64, 64]" in text


def test_bad_input() -> None:
    with pytest.raises(InvalidInputError, match="without a model"):
        run("--tp", "8")
    with pytest.raises(InvalidInputError, match="nothing is downloaded"):
        run("nowhere/config.json")
