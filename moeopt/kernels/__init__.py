"""What can be tuned: our own Triton kernel and the engines' kernels."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from moeopt.errors import DeviceError, InvalidInputError

if TYPE_CHECKING:
    from moeopt.kernels.base import MoEKernel

__all__ = ["KERNEL_NAMES", "get_kernel"]

KERNEL_NAMES: Final = ("builtin", "sglang", "vllm", "auto")
_log = logging.getLogger(__name__)


def get_kernel(name: str = "auto", *, engine: str | None = None) -> MoEKernel:
    """The kernel to tune.

    Args:
        name: ``builtin``, ``sglang``, ``vllm``, or ``auto``: the engine's kernel where it is here, else ours.
        engine: The engine that the config files are for, ``sglang`` or ``vllm``; what ``auto`` looks for.
            Without it ``auto`` takes the first engine that is here.

    Raises:
        InvalidInputError: The name or the engine is unknown.
        DeviceError: An engine was named that is not here.
    """
    if name not in KERNEL_NAMES:
        raise InvalidInputError(f"kernel {name!r} is unknown: give one of {', '.join(KERNEL_NAMES)}")
    if engine not in (None, "sglang", "vllm"):
        raise InvalidInputError(f"engine {engine!r} is unknown: give 'sglang' or 'vllm'")
    if name == "auto":
        name = _first_engine((engine,) if engine else ("sglang", "vllm"), warn=engine is not None)
    if name == "sglang":
        from moeopt.kernels.sglang import SglangKernel

        return SglangKernel()
    if name == "vllm":
        from moeopt.kernels.vllm import VllmKernel

        return VllmKernel()
    from moeopt.kernels.builtin import BuiltinKernel

    return BuiltinKernel()


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
