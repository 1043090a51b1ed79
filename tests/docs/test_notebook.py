"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook: Any = nbformat.read(path, as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "clear its outputs before it is committed"
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    figures = [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert len(figures) == 4
    printed = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert "x the default" in printed and printed.rstrip().endswith("µs")
    assert [output for output in outputs if output.get("name") == "stderr"] == []
