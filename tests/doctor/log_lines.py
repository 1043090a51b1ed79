"""Log lines of the engines about MoE kernels, read out of their sources: the texts of their loggers' calls.

``python -m tests.doctor.log_lines`` prints those of all releases under ``.cache/engines`` as the table
``tests/data/engine_log_lines.json`` has them; lines that are new there have no ``kind`` yet.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

TABLE: Final = Path(__file__).parents[1] / "data" / "engine_log_lines.json"
_CALLS: Final = frozenset({"info", "info_once", "warning", "warning_once", "log_info_on_rank0", "debug_once"})
# Where experts are run or their weights are loaded.
_PLACES: Final = ("layers/moe", "layers/fused_moe", "layers/quantization", "ops/moe", "arg_groups")
_ABOUT: Final = re.compile(
    r"MoE (kernel )?config|for MoE layer|down_moe|Down MoE|MoE (LoRA |\{\})?backend|MoE runner backend"
    r"|backend for .*MoE|kernels? for .*MoE|WNA16\w*MoE|using triton for its|_marlin kernel|block scales refined"
    r"|complete checkpoint blocks|default MoE|Config file not found"
)


def log_lines(tree: Path) -> set[str]:
    """The texts of a release, with ``{}`` where something is filled in.

    Args:
        tree: The folder that holds the unpacked package.
    """
    found = set()
    for path in tree.rglob("*.py"):
        if any(place in path.as_posix() for place in _PLACES):
            try:
                module = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
            except SyntaxError:
                continue
            found |= {text for text in _texts(module) if _ABOUT.search(text)}
    return found


def _texts(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for argument in node.args[:2] if name in _CALLS else ():
                yield from filter(None, (_text(argument),))
        elif isinstance(node, ast.FunctionDef) and "log_backend" in node.name:
            # vLLM's oracles build their lines in functions of this name.
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from filter(None, (_text(inner.value),))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]", "{}", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def table(cache: Path, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each text: engine, text, kind, releases that have it."""
    seen = {(row["engine"], row["text"]): row for row in known}
    rows: dict[tuple[str, str], list[str]] = {}
    for tree in cache.glob("*-*"):
        engine, _, version = tree.name.partition("-")
        for text in log_lines(tree):
            rows.setdefault((engine, text), []).append(version)
    return [
        {
            "engine": engine,
            "text": text,
            "versions": sorted(versions, key=_order),
            # What the doctor reads in a line of it, and such a line; nothing for those that say nothing to it.
            "kind": seen.get((engine, text), {}).get("kind"),
            "example": seen.get((engine, text), {}).get("example", text),
        }
        for (engine, text), versions in sorted(rows.items())
    ]


def _order(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


if __name__ == "__main__":
    old = json.loads(TABLE.read_text()) if TABLE.exists() else []
    json.dump(table(Path(__file__).parents[2] / ".cache" / "engines", old), sys.stdout, indent=1)
