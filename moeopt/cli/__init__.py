"""The command line: one module per command."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import typer

from moeopt.errors import InvalidInputError, MoeoptError

COMMANDS: Final = (
    "tune", "plan", "status", "export", "verify", "doctor", "record", "report", "compile", "suggest",
    "models", "dashboard", "worker",
)  # fmt: skip
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def build_app() -> typer.Typer:
    """The typer application with every command."""
    app = typer.Typer(
        name="moeopt",
        help="Tunes the launch parameters of the Triton fused MoE kernel and writes the files that engines read.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_without_command)
    for name in COMMANDS:
        if importlib.util.find_spec(f"moeopt.cli.{name}"):
            importlib.import_module(f"moeopt.cli.{name}").register(app)
    return app


def _without_command(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and end.", is_eager=True),
) -> None:
    if version:
        from moeopt import __version__

        typer.echo(f"moeopt {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        from moeopt.cli.overview import overview

        typer.echo(overview())


# Whatever copy of click this version of typer stands on.
_UsageError: Final[type[Exception]] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Runs the command line. Bad input is one line on stderr and exit status 2."""
    # A shell's >&- leaves Python without the stream.
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        _start_log(os.environ.get("MOEOPT_LOG") or "WARNING")
        code = build_app()(prog_name="moeopt", standalone_mode=False)
        sys.stdout.flush()
    except MoeoptError as error:
        _refuse(str(error))
    except _UsageError as error:
        _refuse(_usage(error))
    except typer.Abort:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away: nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _start_log(level: str) -> None:
    if level.upper() not in LOG_LEVELS:
        raise InvalidInputError(f"MOEOPT_LOG is {level!r}: give {', '.join(LOG_LEVELS)}, or leave it unset")
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")


def _refuse(message: str) -> NoReturn:
    sys.stdout.flush()
    print(f"moeopt: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _usage(error: Any) -> str:
    """One line for an option or command that the parser refuses."""
    context = error.ctx
    command = context.command_path if context is not None else "moeopt"
    return f"{error.format_message().rstrip('.')}: see {command} --help"


if __name__ == "__main__":
    main()
