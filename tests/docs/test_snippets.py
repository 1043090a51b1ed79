"""What README and docs tell a reader to type works, and prints what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from moeopt.cli import build_app

from .pages import PAGES, ROOT, Snippet, commands, snippets, workplace

# In words: some snippets need what a test has not.
NEEDS = {
    "": "nothing",
    "gpu": "a CUDA GPU",
    "gpus": "eight of them",
    "gb10": "a GB10",
    "sglang": "SGLang and a model",
    "vllm": "vLLM and a model",
    "docker": "a container engine",
    "make": "the repository itself",
    "network": "a package index",
    "minutes": "minutes of compiling",
    "postgres": "a database server with a GPU beside it",
    "ray": "a Ray cluster with GPUs",
}
WITH_SNIPPETS = [page for page in PAGES if snippets(page)]


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix(""))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=_id)
def test_the_snippets_of_a_page_work(page: Path, tmp_path: Path) -> None:
    environment = workplace(tmp_path)
    python = ""
    for snippet in snippets(page):
        assert snippet.needs in NEEDS, f"{page}:{snippet.line}"
        if snippet.needs and not (snippet.needs == "gpu" and _has_gpu()):
            continue
        if snippet.kind == "python":  # the later ones of a page go on from the earlier ones
            python += snippet.text
        command = [sys.executable, "-c", python] if snippet.kind == "python" else ["bash", "-ec", snippet.text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=500
        )
        where = f"{page.name}:{snippet.line}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == snippet.status, where
        _assert_printed(snippet, done.stdout.splitlines(), where)


def _assert_printed(snippet: Snippet, printed: list[str], where: str) -> None:
    for line in snippet.output:
        pattern = ".*".join(re.escape(part) for part in line.rstrip().split("..."))
        assert any(re.fullmatch(pattern, one.rstrip()) for one in printed), f"not printed: {line}\n{where}"


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=_id)
def test_commands_have_the_options_that_pages_give_them(page: Path) -> None:
    """Also those that nothing here can run."""
    app: Any = typer.main.get_command(build_app())
    for snippet in snippets(page):
        if snippet.kind == "sh":
            for name, *arguments in filter(None, commands(snippet.text)):
                app.commands[name].make_context(name, arguments)


def test_every_command_has_a_line_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    app: Any = typer.main.get_command(build_app())
    assert [name for name in app.commands if f"| `moeopt {name}`" not in readme] == []
