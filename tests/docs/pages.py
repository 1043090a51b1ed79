"""Pages of the docs as what they ask a reader to type, and a place to type it.

A fenced block of ``sh`` or ``python`` is a snippet; a ``text`` block behind it is what it prints, ``...`` standing for
anything. A comment in front of it says what it needs (``<!-- test: needs=gpu -->``) or how it ends
(``<!-- test: exit=1 -->``).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"(?:^<!-- test: (?P<said>[^>]*) -->\n)?^```(?P<kind>sh|python|text)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Snippet:
    """One block.

    Attributes:
        kind: ``sh`` or ``python``.
        text: What is typed.
        needs: What the machine must have, or "".
        status: Its exit status.
        output: Lines that it prints.
        line: Where it begins in its page.
    """

    kind: str
    text: str
    needs: str
    status: int
    line: int
    output: tuple[str, ...] = ()


def snippets(page: Path) -> list[Snippet]:
    """The snippets of a page, in order."""
    content = page.read_text(encoding="utf-8")
    found: list[Snippet] = []
    for block in _FENCE.finditer(content):
        said = dict(pair.split("=") for pair in (block["said"] or "").split())
        if block["kind"] == "text":
            if found:
                found[-1].output = tuple(line for line in block["text"].splitlines() if line.strip() not in ("", "..."))
            continue
        line = content[: block.start("text")].count("\n") + 1
        found.append(Snippet(block["kind"], block["text"], said.get("needs", ""), int(said.get("exit", 0)), line))
    return found


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each ``moeopt`` command line in a shell snippet."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and ("=" in words[0].split("/")[0] or words[0] == "nice"):
            words.pop(0)
        if words[:1] == ["moeopt"]:
            ends = [i for i, word in enumerate(words) if word in ("|", "||", "&&", "2>&1", ">")]
            yield words[1 : min(ends, default=len(words))]


def workplace(directory: Path) -> dict[str, str]:
    """Lays out what the pages suppose, and returns the environment to type in: ``moeopt`` and ``python`` are ours."""
    data = ROOT / "tests" / "data"
    shutil.copytree(ROOT / "studies", directory / "studies", ignore=shutil.ignore_patterns("*.db*", "*.npz", "out"))
    model = directory / "Qwen3.5-122B-A10B"
    model.mkdir()
    shutil.copy(data / "models" / "qwen3.5-122b.json", model / "config.json")
    shutil.copy(data / "logs" / "sglang-qwen3.5-122b-no-file.log", directory / "server.log")
    shutil.copy(data / "logs" / "sglang-glm5-nvfp4-flashinfer-cutlass.log", directory / "glm5.log")
    bin_ = directory / ".bin"
    bin_.mkdir()
    for name, what in (("moeopt", "-m moeopt.cli"), ("python", ""), ("pip", "-m pip")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n')
        (bin_ / name).chmod(0o755)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path, "COLUMNS": "200"}
