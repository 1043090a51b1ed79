"""Format ``moe-landscape/1`` of recordings, read and written: measured landscapes in a file.

Gzipped JSON lines. Line 1 is the header (:class:`Header`), every other line one config
(:class:`RecordedConfig`) with its resources and, per batch size, microseconds of each replay.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from moeopt.compile.occupancy import Occupancy
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import Provenance, split_kernel, split_routing
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.trial import Resources
from moeopt.errors import MoeoptError, RecordingError

FORMAT: Final = "moe-landscape/1"
Status = Literal["ok", "out_of_resources", "compile_error"]
# Microseconds: positive and under 30 years.
Time = Annotated[float, Meta(gt=0, lt=1e15)]
BatchSize = Annotated[int, Meta(ge=1)]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole recording has in common: its first line. What is unset is not in the file.

    Attributes:
        format: :data:`FORMAT`.
        kernel: Name and version of the kernel.
        kernel_hash: Hash of its source.
        shape: The layer.
        gpu: The GPU; fields that the file lacks are from the table of GPUs.
        versions: Of Triton, torch, driver and others, by name.
        timing: How times were taken, for people.
        slow_factor: A config this many times slower than the best was timed once.
        routing: Routing and L2, as :attr:`Provenance.routing_title` has them.
        roles: What the launches compute, for people.
        space: For each key of the space its values.
        sample: How many configs of the space were picked, or None for all.
        batch_sizes: M.
        complete: Whether all configs of the space are there.
        clocks: Clocks, power and temperature of the GPU.
        roofline_us: Per role and batch size, microseconds at the GPU's measured rates.
    """

    format: str = FORMAT
    kernel: str
    kernel_hash: str | UnsetType = UNSET
    shape: MoEShape
    gpu: GpuSpec
    versions: dict[str, Any]
    timing: str | UnsetType = UNSET
    slow_factor: float | UnsetType = UNSET
    routing: str | UnsetType = UNSET
    roles: dict[str, str] | UnsetType = UNSET
    space: dict[str, list[Any]] | UnsetType = UNSET
    sample: int | UnsetType | None = UNSET
    batch_sizes: list[int] | UnsetType = UNSET
    complete: bool | UnsetType = UNSET
    clocks: dict[str, Any] | UnsetType = UNSET
    roofline_us: dict[str, dict[BatchSize, Time]] | UnsetType = UNSET

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> Header:
        """The inverse of :meth:`encode`; keys of others are passed over.

        Raises:
            InvalidInputError: Shape or GPU cannot be used.
            msgspec.ValidationError: A key is missing, or its value is of another type.
        """
        typed = {name: kind.from_dict(data[name]) for name, kind in _TYPED.items() if name in data}
        return msgspec.convert({**data, **typed}, cls, str_keys=True)

    def encode(self) -> dict[str, Any]:
        """The first line of a file, JSON-ready."""
        plain = msgspec.to_builtins(self, str_keys=True)
        return {**plain, "shape": self.shape.to_dict(), "gpu": self.gpu.to_dict()}

    def provenance(self, source: str) -> Provenance:
        """What the times come from.

        Args:
            source: One line that says so to people.
        """
        kernel, version = split_kernel(self.kernel)
        routing, warm_l2 = split_routing(self.routing or "uniform")
        versions = {name: str(self.versions.get(name, "")) for name in ("triton", "torch", "driver")}
        hashed = self.kernel_hash or ""
        return Provenance(source, kernel, version, hashed, **versions, routing=routing, recorded=True, warm_l2=warm_l2)


_TYPED: Final[Mapping[str, type[MoEShape] | type[GpuSpec]]] = {"shape": MoEShape, "gpu": GpuSpec}


class RecordedRole(msgspec.Struct, frozen=True, kw_only=True):
    """One role of one config.

    Attributes:
        registers: Per thread.
        spills: Bytes of local memory per thread.
        shared_bytes: Shared memory of one program.
        relative_error: Against the reference.
        us: Per batch size, microseconds per launch of each replay.
        occupancy: Blocks per multiprocessor.
        tensor_core: Kind, tile and operands of the tensor-core instruction, None where it is not known.
        rejected: Why it would not be launched.
    """

    registers: int
    spills: int
    shared_bytes: int
    relative_error: float | None = None
    us: dict[BatchSize, Annotated[tuple[Time, ...], Meta(min_length=1)]]
    occupancy: Occupancy | UnsetType = UNSET
    tensor_core: dict[str, str] | UnsetType | None = UNSET
    rejected: str | UnsetType = UNSET


class RecordedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a recording.

    Attributes:
        config: The launch config.
        status: What became of it.
        reason: Why it has no time, in one of the field's words.
        error: The same in one line.
        compile_s: Seconds of compiling both roles, or None where it is not known.
        up: Its up projection.
        down: Its down projection.
    """

    config: LaunchConfig
    status: Status
    reason: str | UnsetType = UNSET
    error: str | UnsetType | None = UNSET
    compile_s: float | None = None
    up: RecordedRole | UnsetType = UNSET
    down: RecordedRole | UnsetType = UNSET

    def __post_init__(self) -> None:
        for role in ROLES:
            if self.status == "ok" and role not in self.roles:
                raise ValueError(f"{role!r} is missing")

    @property
    def roles(self) -> dict[Role, RecordedRole]:
        """The roles that it has."""
        return {role: part for role in ROLES if not isinstance(part := getattr(self, role), UnsetType)}

    def resources(self, role: Role) -> Resources:
        """What the compiler said of one of its roles."""
        part = self.roles[role]
        return Resources(part.registers, part.spills, part.shared_bytes, self.compile_s or 0.0)

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> RecordedConfig:
        """The inverse of :meth:`encode`; keys of others are passed over.

        Raises:
            InvalidInputError: The config cannot be used.
            msgspec.ValidationError: A key is missing, or its value is of another type or out of its range.
        """
        return msgspec.convert({**data, "config": LaunchConfig.from_dict(data.get("config", {}))}, cls, str_keys=True)

    def encode(self) -> dict[str, Any]:
        """One line of a file, JSON-ready."""
        return {**msgspec.to_builtins(self, str_keys=True), "config": self.config.to_dict()}


@dataclass(frozen=True)
class Recording:
    """A landscape read from a file.

    Attributes:
        path: Where it was read.
        header: Its first line.
        rows: Every config.
    """

    path: Path
    header: Header
    rows: Mapping[LaunchConfig, RecordedConfig]

    @property
    def shape(self) -> MoEShape:
        """The layer it was measured for."""
        return self.header.shape

    @property
    def gpu(self) -> GpuSpec:
        """The GPU it was measured on."""
        return self.header.gpu

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that every timed config was timed for, ascending."""
        timed = [set(role.us) for row in self.rows.values() for role in row.roles.values()]
        return tuple(sorted(set.intersection(*timed))) if timed else ()

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Reads a recording.

        Raises:
            RecordingError: Not a recording, truncated, or a line that cannot be used.
        """
        path = Path(path)
        first, *lines = read_lines(path)
        try:
            header = Header.decode(first)
        except (MoeoptError, msgspec.ValidationError) as error:
            raise RecordingError(f"{path}: the header cannot be used ({error}); record it again") from None
        rows: dict[LaunchConfig, RecordedConfig] = {}
        for number, line in enumerate(lines, start=2):
            try:
                row = RecordedConfig.decode(line)
            except (MoeoptError, msgspec.ValidationError) as error:
                raise RecordingError(f"{path}: line {number} cannot be used ({error}); record it again") from None
            if row.config in rows:
                raise RecordingError(f"{path}: line {number} repeats the config {row.config}; record it again")
            rows[row.config] = row
        if not rows:
            raise RecordingError(f"{path}: holds no configs; record it again")
        return cls(path, header, rows)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a recording as they are, the header first.

    Raises:
        RecordingError: It is not gzipped JSON lines of objects, is truncated, or is of another format.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            texts = file.read().rstrip().split("\n")
    except FileNotFoundError:
        raise RecordingError(f"{path}: no such file; give the path of a recording") from None
    except EOFError:
        raise RecordingError(f"{path}: truncated; copy or record it again") from None
    except (OSError, zlib.error, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: not a recording ({error}); expected gzipped JSON lines, {FORMAT}") from None
    if texts == [""]:
        raise RecordingError(f"{path}: empty; expected gzipped JSON lines, {FORMAT}")
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(json.loads(text))
        except (ValueError, RecursionError):
            raise RecordingError(f"{path}: line {number} is not JSON (truncated?); copy or record it again") from None
        if not isinstance(lines[-1], dict):
            raise RecordingError(f"{path}: line {number} is not a JSON object; not a recording")
        if number == 1 and lines[0].get("format") != FORMAT:
            found = lines[0].get("format")
            raise RecordingError(f"{path}: not a recording of format {FORMAT} (its format is {found!r})")
    return lines
