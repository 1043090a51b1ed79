"""Names of the engines whose config files moeopt writes."""

from __future__ import annotations

from typing import Final, Literal

from moeopt.errors import InvalidInputError

Engine = Literal["sglang", "vllm"]


ENGINES: Final[tuple[Engine, Engine]] = ("sglang", "vllm")


def check_engine(engine: str) -> Engine:
    """The engine, if it is one.

    Raises:
        InvalidInputError: Another name was given.
    """
    for known in ENGINES:
        if engine == known:
            return known
    raise InvalidInputError(f"engine {engine!r} is unknown: give {' or '.join(ENGINES)}")
