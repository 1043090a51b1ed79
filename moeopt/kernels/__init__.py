"""What can be tuned: our own Triton kernel and the engines' kernels."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from moeopt.errors import InvalidInputError

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
        from moeopt.kernels.engine_source import engine_available

        wanted = (engine,) if engine else ("sglang", "vllm")
        name = next((e for e in wanted if engine_available(e)), "builtin")
        if name == "builtin" and engine:
            _log.warning(
                "%s is not installed here: the configs are tuned on moeopt's own kernel, not on the one that will "
                "read them",
                engine,
            )
    if name == "sglang":
        from moeopt.kernels.sglang import SglangKernel

        return SglangKernel()
    if name == "vllm":
        from moeopt.kernels.vllm import VllmKernel

        return VllmKernel()
    from moeopt.kernels.builtin import BuiltinKernel

    return BuiltinKernel()
