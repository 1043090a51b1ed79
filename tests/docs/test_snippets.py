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
from tests.storage.conftest import postgres, postgres_url  # noqa: F401  (fixtures)

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
    "postgres": "a database server, named by $STORAGE",
    "server": "that, and a GPU",
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
        _run(page, snippet, command, tmp_path, environment)


@pytest.mark.postgres
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(one.needs == "postgres" for one in snippets(page))], ids=_id
)
def test_the_snippets_of_a_page_work_with_a_database_server(
    page: Path,
    tmp_path: Path,
    postgres_url: str,  # noqa: F811  (the fixture)
) -> None:
    environment = {**workplace(tmp_path), "STORAGE": postgres_url}
    for snippet in snippets(page):
        if snippet.needs == "postgres":
            _run(page, snippet, ["bash", "-ec", snippet.text], tmp_path, environment)


def _run(page: Path, snippet: Snippet, command: list[str], where: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=500)
    said = f"{page.name}:{snippet.line}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == snippet.status, said
    for line in snippet.output:
        pattern = ".*".join(re.escape(part) for part in line.rstrip().split("..."))
        printed = (one.rstrip() for one in done.stdout.splitlines())
        assert any(re.fullmatch(pattern, one) for one in printed), f"not printed: {line}\n{said}"


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
