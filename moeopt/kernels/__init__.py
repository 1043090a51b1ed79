"""Kernels that can be tuned: our own Triton kernel and the engines' kernels."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from moeopt import engines
from moeopt.errors import DeviceError, InvalidInputError

if TYPE_CHECKING:
    from moeopt.kernels.base import MoEKernel

__all__ = ["check_kernel", "get_kernel"]

_log = logging.getLogger(__name__)


def check_kernel(name: str) -> None:
    """Raises InvalidInputError where :func:`get_kernel` knows no kernel of this name."""
    known = ("builtin", *engines.names(), "auto")
    if name not in known:
        raise InvalidInputError(f"kernel {name!r} is unknown: give one of {', '.join(known)}")


def get_kernel(name: str = "auto", *, engine: str | None = None) -> MoEKernel:
    """The kernel to tune.

    Args:
        name: ``builtin``, an engine's name, or ``auto``: the engine's kernel where it is here, else ours.
        engine: The engine that the config files are for, what ``auto`` looks for. Without it ``auto`` takes
            the first engine that is here.

    Raises:
        InvalidInputError: The name or the engine is unknown.
        DeviceError: An engine was named that is not here.
    """
    check_kernel(name)
    wanted = engines.names() if engine is None else (engines.get(engine).name,)
    if name == "auto":
        name = _first_engine(wanted, warn=engine is not None)
    if name == "builtin":
        from moeopt.kernels.builtin import BuiltinKernel

        return BuiltinKernel()
    module, _, adapter = engines.get(name).kernel.adapter.partition(":")
    kernel: MoEKernel = getattr(import_module(module), adapter)()
    return kernel


def _first_engine(wanted: tuple[str, ...], *, warn: bool) -> str:
    """The first of these engines that is here, else ``builtin``."""
    from moeopt.engines.source import find_engine

    for engine in wanted:
        try:
            find_engine(engine)
        except DeviceError as error:
            if warn:
                _log.warning(
                    "the configs are tuned on moeopt's own kernel, not on the one of %s that will read them: %s",
                    engine, error,
                )  # fmt: skip
        else:
            return engine
    return "builtin"
