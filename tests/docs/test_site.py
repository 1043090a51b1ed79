"""The site says all that is public, and its pictures are those of the results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import moeopt
from benchmarks import figures
from moeopt.cli import build_app
from moeopt.report.chart import DARK, LIGHT, standalone

from .pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    named = re.findall(r"^::: moeopt\.(\w+)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert sorted(set(named) - {"errors"}) == sorted(moeopt.__all__)


@pytest.mark.parametrize("name", sorted(figures.pictures()))
def test_the_pictures_are_drawn_from_the_results(name: str) -> None:
    charts = figures.pictures()[name]
    for theme, colours in (("light", LIGHT), ("dark", DARK)):
        drawn = (ROOT / "docs" / "assets" / f"{name}-{theme}.svg").read_text(encoding="utf-8")
        assert drawn == standalone(charts, colours), "run python -m benchmarks.figures"


def test_the_page_of_the_command_line_has_every_option() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown((REFERENCE / "command-line.md").read_text(encoding="utf-8"))
    app: Any = typer.main.get_command(build_app())
    for name, command in app.commands.items():
        section = page.partition(f"\n## moeopt {name}\n")[2].partition("\n## ")[0]
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert [
            one for one in sorted(options - {"--help"}) if f"{one} " not in section and f"{one}<" not in section
        ] == []


def test_the_version_stands_in_one_place() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {moeopt.__version__}" in citation
    assert re.search(rf"^## {re.escape(moeopt.__version__)}\b", changelog, re.MULTILINE)
    assert "version" not in re.findall(r"^(\w+) = \"", Path(ROOT / "pyproject.toml").read_text(), re.MULTILINE)
