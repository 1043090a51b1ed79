"""What ``import moeopt`` brings along."""

from __future__ import annotations

import subprocess
import sys

import moeopt


def test_import_brings_neither_torch_nor_triton_nor_plotly() -> None:
    code = "import sys, moeopt; print([m for m in ('torch', 'triton', 'plotly', 'pandas', 'ray') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_all_public_names_are_there() -> None:
    assert sorted(moeopt.__all__) == sorted(set(moeopt.__all__))
    assert all(hasattr(moeopt, name) for name in moeopt.__all__)
