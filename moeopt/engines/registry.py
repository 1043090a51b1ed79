"""Registry of engines: the one place that names them all."""

from __future__ import annotations

from typing import Final

from moeopt.engines.sglang import SGLANG
from moeopt.engines.spec import EngineSpec
from moeopt.engines.vllm import VLLM
from moeopt.errors import InvalidInputError

_SPECS: Final[dict[str, EngineSpec]] = {spec.name: spec for spec in (SGLANG, VLLM)}

# Whose rules hold where no engine is named.
DEFAULT: Final = SGLANG.name


def get(name: str) -> EngineSpec:
    """The engine of a name.

    Raises:
        InvalidInputError: There is none.
    """
    spec = _SPECS.get(name)
    if spec is None:
        raise InvalidInputError(f"engine {name!r} is unknown: give {' or '.join(_SPECS)}")
    return spec


def names() -> tuple[str, ...]:
    """The names of all engines."""
    return tuple(_SPECS)


def every() -> tuple[EngineSpec, ...]:
    """All engines."""
    return tuple(_SPECS.values())


def register(spec: EngineSpec) -> None:
    """Makes an engine known by its name.

    Raises:
        InvalidInputError: Another engine has the name.
    """
    if _SPECS.setdefault(spec.name, spec) is not spec:
        raise InvalidInputError(f"engine {spec.name!r} is there already: give the new one another name")


def of_kernel(kernel: str) -> EngineSpec:
    """The engine that launches a kernel; of a kernel that is not an engine's, the default engine."""
    return _SPECS.get(kernel, _SPECS[DEFAULT])
