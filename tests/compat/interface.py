"""What users call: commands with their options, and Python's names with their parameters, as JSON."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import typer


def command_table(app: typer.Typer) -> dict[str, Any]:
    """Of each command its arguments, in order, and its options by name."""
    group: Any = typer.main.get_command(app)
    return {
        name: {
            "arguments": [
                [param.name, _kind(param)] for param in command.params if param.param_type_name == "argument"
            ],
            "options": {
                option: _kind(param)
                for param in command.params
                if param.param_type_name == "option"
                for option in (*param.opts, *param.secondary_opts)
            },
        }
        for name, command in group.commands.items()
    }


def _kind(param: Any) -> dict[str, Any]:
    default = param.default
    return {
        "required": param.required,
        "flag": bool(getattr(param, "is_flag", False)),
        "several": bool(getattr(param, "multiple", False)),
        "default": default if isinstance(default, str | int | float) else None,
    }


def signature(function: Callable[..., Any]) -> list[list[str]]:
    """Name, kind and default of each parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [[p.name, p.kind.name, "" if p.default is inspect.Parameter.empty else repr(p.default)] for p in parameters]
