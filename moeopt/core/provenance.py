"""Provenance of times: kernel, versions, routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What is part of a study's exact key, JSON-ready strings and numbers only.

    Attributes:
        source: First line of a run's output: what the times come from.
        kernel: Name of the kernel (``builtin``, ``sglang``, ``vllm``).
        kernel_version: Its version, or "".
        kernel_hash: Hash of its source.
        triton: Triton's version.
        torch: torch's version.
        driver: The GPU driver's version, or "".
        routing: Key of the routing distribution.
        recorded: Whether the times are replayed.
    """

    source: str
    kernel: str
    kernel_version: str
    kernel_hash: str
    triton: str
    torch: str
    driver: str = ""
    routing: str = "uniform"
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Which kernel a time belongs to.

    Attributes:
        name: ``builtin``, ``sglang`` or ``vllm``.
        version: The engine's version, or moeopt's own.
        source_hash: First 16 hex digits of the SHA-256 of the kernel's source.
    """

    name: str
    version: str
    source_hash: str


# Ends the key of a routing where weights may stay in L2: these times must not share a study with cold ones.
WARM_L2: Final = ", warm L2"
