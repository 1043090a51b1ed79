"""Options of a GPU device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from moeopt.core.fields import Rate, check_fields
from moeopt.core.provenance import Provenance
from moeopt.errors import InvalidInputError
from moeopt.kernels import check_kernel
from moeopt.kernels.routing import Routing


@dataclass(frozen=True)
class DeviceOptions:
    """How a GPU is used. A recording's times are what they are: another kernel or routing is refused for it.

    Attributes:
        kernel: ``builtin``, ``sglang``, ``vllm`` or ``auto``.
        engine: The engine that the result is for, which ``auto`` looks for.
        routing: Distribution of tokens over experts, as :class:`moeopt.kernels.routing.Routing` reads it.
        seed: Of operands and routings.
        workers: Compile processes, or None for all cores but one.
        warm_l2: Whether the weights may stay in L2 between launches.
        wait_idle: Seconds to wait for a busy GPU to become quiet before each batch of timings.
        compile_cache: Directory of Triton's cache, or None for Triton's own.
        executor: ``local``, or ``ray`` for the GPUs of a Ray cluster.
    """

    kernel: str = "auto"
    engine: str | None = None
    routing: str = "uniform"
    seed: int = 0
    workers: Annotated[int, Meta(ge=1, description="at least 1 compile process")] | None = None
    warm_l2: bool = False
    wait_idle: Rate = 0.0
    compile_cache: Path | None = None
    executor: Literal["local", "ray"] = "local"

    def __post_init__(self) -> None:
        check_fields(self)
        check_kernel(self.kernel)
        Routing.parse(self.routing)

    @classmethod
    def as_measured(cls, times: Provenance, given: str | None = None, **options: Any) -> DeviceOptions:
        """Options that measure as earlier times were measured.

        Args:
            times: What they come from.
            given: The routing that the user names, which a file needs: a key holds its hash, not its path.
            **options: The others.

        Raises:
            InvalidInputError: Another routing is given, or a file is needed and none is given.
        """
        if times.routing.startswith("file:") and given is None:
            raise InvalidInputError("these times are of a routing file: give it again with --routing file:PATH")
        if given is not None and Routing.parse(given).key != times.routing:
            raise InvalidInputError(f"routing {given!r} was given, and these times are of {times.routing!r}: omit it")
        return cls(kernel=times.kernel, routing=given or times.routing, warm_l2=times.warm_l2, **options)
