"""The plan of the package: sizes of modules and functions, and what stands on its ground floor."""

from __future__ import annotations

import ast
from pathlib import Path

import moeopt

PACKAGE = Path(moeopt.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
# One program of the GPU, whose source is part of every study's key.
KERNEL = "builtin_kernel.py:moe_kernel"


def test_no_module_is_over_450_lines() -> None:
    long = {path.name: n for path in MODULES if (n := len(path.read_text(encoding="utf-8").splitlines())) > 450}
    assert not long


def test_no_function_is_over_60_lines() -> None:
    """Without its docstring."""
    long = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                if lines > 60 and f"{path.name}:{node.name}" != KERNEL:
                    long[f"{path.name}:{node.name}"] = lines
    assert not long


def test_few_modules_stand_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 10


def test_modules_say_what_they_are() -> None:
    said = {
        path.relative_to(PACKAGE): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in MODULES
    }
    assert all(said.values()), [path for path, text in said.items() if not text]
    questions = ("What ", "Which ", "How ", "Whether ", "Where ", "From ")
    assert not [path for path, text in said.items() if text and text.startswith(questions)]
