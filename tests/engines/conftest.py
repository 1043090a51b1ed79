"""Fixtures of the command line's tests, for an engine that is used through it."""

from tests.cli.conftest import run

__all__ = ["run"]
