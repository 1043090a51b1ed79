"""The site says all that is public, and its pictures are those of the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moeopt
from benchmarks import figures
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


def test_the_version_stands_in_one_place() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {moeopt.__version__}" in citation
    assert re.search(rf"^## {re.escape(moeopt.__version__)}\b", changelog, re.MULTILINE)
    assert "version" not in re.findall(r"^(\w+) = \"", Path(ROOT / "pyproject.toml").read_text(), re.MULTILINE)
