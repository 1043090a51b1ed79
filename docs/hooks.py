"""The page of the command line, from the commands themselves."""

from __future__ import annotations

import html
from typing import Any

import typer

from moeopt.cli import COMMANDS, build_app

_MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Writes every command where a page asks for them."""
    return markdown.replace(_MARK, commands()) if _MARK in markdown else markdown


def commands() -> str:
    """Each command with its arguments and options, in Markdown."""
    app: Any = typer.main.get_command(build_app())
    return "\n\n".join(_command(name, app.commands[name]) for name in COMMANDS)


def _command(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["moeopt", name, *command.collect_usage_pieces(context)])
    lines = [f"## moeopt {name}", "", command.help or "", "", "```text", usage, "```", ""]
    lines += ["| option | |", "| --- | --- |"]
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            what, text = (html.escape(part, quote=False).replace("|", "\\|") for part in record)
            lines.append(f"| <code>{what}</code> | {text} |")
    return "\n".join(lines)
