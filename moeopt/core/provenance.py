"""Provenance of times: kernel, versions, routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

_WARM_L2: Final = ", warm L2"


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


@dataclass(frozen=True, slots=True)
class Provenance:
    """What times come from, apart from shape and GPU: a part of a study's exact key.

    Attributes:
        source: First line of a run's output: what the times come from, for people. Not compared.
        kernel: Name of the kernel (``builtin``, ``sglang``, ``vllm``).
        kernel_version: Its version, or "".
        kernel_hash: Hash of its source, or "".
        triton: Triton's version.
        torch: torch's version.
        driver: The GPU driver's version, or "".
        routing: Key of the routing distribution.
        recorded: Whether the times are replayed from a recording.
        warm_l2: Whether weights could stay in L2 between launches.
    """

    source: str = field(compare=False)
    kernel: str
    kernel_version: str = ""
    kernel_hash: str = ""
    triton: str = ""
    torch: str = ""
    driver: str = ""
    routing: str = "uniform"
    recorded: bool = False
    warm_l2: bool = False

    @property
    def kernel_title(self) -> str:
        """Name and version of the kernel, such as ``sglang 0.5.23``."""
        return f"{self.kernel} {self.kernel_version}".strip()

    @property
    def routing_title(self) -> str:
        """Routing and L2 as they are stored: times with a warm L2 must not share a study with cold ones."""
        return self.routing + (_WARM_L2 if self.warm_l2 else "")

    def to_dict(self) -> dict[str, str | bool]:
        """What a study's attributes hold of it."""
        values = asdict(self) | {"routing": self.routing_title}
        return {name: value for name, value in values.items() if name not in ("source", "warm_l2")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "") -> Provenance:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, TypeError: It is not such a mapping.
        """
        names = [name for name in cls.__dataclass_fields__ if name not in ("source", "warm_l2")]
        routing, warm_l2 = split_routing(data["routing"])
        return cls(source, **{**{name: data[name] for name in names}, "routing": routing}, warm_l2=warm_l2)


def split_kernel(title: str) -> tuple[str, str]:
    """Name and version out of :attr:`Provenance.kernel_title`."""
    name, version, *_ = [*title.split(" "), ""]
    return name, version


def split_routing(title: str) -> tuple[str, bool]:
    """Key of the routing, and whether L2 was warm, out of :attr:`Provenance.routing_title`."""
    return title.removesuffix(_WARM_L2), title.endswith(_WARM_L2)
