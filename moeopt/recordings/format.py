"""Recordings: measured landscapes in a file, and a device that replays one.

Format ``moe-landscape/1``: gzipped JSON lines. Line 1 is the header (shape, gpu, kernel, versions,
timing, space, complete). Every other line is one config with status ``ok``, ``out_of_resources``
or ``compile_error``, and for each role its resources and microseconds per batch size and replay.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.trial import Resources
from moeopt.errors import MoeoptError, RecordingError

FORMAT: Final = "moe-landscape/1"
STATUSES: Final = ("ok", "out_of_resources", "compile_error")


@dataclass(frozen=True)
class RecordedRole:
    """One role of one config.

    Attributes:
        resources: What the compiler said.
        relative_error: Against the reference.
        us: Per batch size, microseconds per launch of each replay.
    """

    resources: Resources
    relative_error: float | None
    us: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True)
class RecordedConfig:
    """One line of a recording."""

    config: LaunchConfig
    status: str
    error: str | None
    roles: Mapping[Role, RecordedRole]


@dataclass(frozen=True)
class Recording:
    """A landscape read from a file.

    Attributes:
        path: Where it was read.
        header: Its first line.
        rows: Every config.
    """

    path: Path
    header: Mapping[str, Any]
    rows: Mapping[LaunchConfig, RecordedConfig]

    @cached_property
    def shape(self) -> MoEShape:
        """The layer it was measured for."""
        return MoEShape.from_dict(self.header["shape"])

    @cached_property
    def gpu(self) -> GpuSpec:
        """The GPU it was measured on."""
        return GpuSpec.from_dict(self.header["gpu"])

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that every timed config was timed for, ascending."""
        common: set[int] | None = None
        for row in self.rows.values():
            for role in row.roles.values():
                common = set(role.us) if common is None else common & set(role.us)
        return tuple(sorted(common or ()))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Reads a recording.

        Raises:
            RecordingError: Not a recording, truncated, or a line that cannot be used.
        """
        path = Path(path)
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                lines = file.read().split("\n")
        except FileNotFoundError:
            raise RecordingError(f"{path}: no such file; give the path of a recording") from None
        except EOFError:
            raise RecordingError(f"{path}: truncated; copy or record it again") from None
        except (OSError, zlib.error, UnicodeDecodeError) as error:
            raise RecordingError(f"{path}: not a recording ({error}); expected gzipped JSON lines, {FORMAT}") from None
        while lines and not lines[-1].strip():
            lines.pop()
        if not lines:
            raise RecordingError(f"{path}: empty; expected gzipped JSON lines, {FORMAT}")
        header = _json(path, 1, lines[0])
        if header.get("format") != FORMAT:
            raise RecordingError(f"{path}: not a recording of format {FORMAT} (its format is {header.get('format')!r})")
        _check_header(path, header)
        rows: dict[LaunchConfig, RecordedConfig] = {}
        for number, line in enumerate(lines[1:], start=2):
            row = _row(path, number, _json(path, number, line))
            if row.config in rows:
                raise RecordingError(f"{path}: line {number} repeats the config {row.config}; record it again")
            rows[row.config] = row
        if not rows:
            raise RecordingError(f"{path}: holds no configs; record it again")
        recording = cls(path=path, header=header, rows=rows)
        try:
            recording.shape, recording.gpu  # noqa: B018  (checks both)
        except MoeoptError as error:
            raise RecordingError(f"{path}: {error}") from None
        return recording


def _json(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordingError(f"{path}: line {number} is not JSON (truncated?); copy or record it again") from None
    if not isinstance(value, dict):
        raise RecordingError(f"{path}: line {number} is not a JSON object; not a recording")
    return value


def _check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Checks the types of what is read from the header."""
    for key in ("shape", "gpu", "kernel", "versions"):
        if key not in header:
            raise RecordingError(f"{path}: the header has no {key!r}; record it again")
    for key in ("shape", "gpu", "versions", "space", "roofline_us"):
        if not isinstance(header.get(key, {}), dict):
            raise RecordingError(f"{path}: the header's {key!r} is not a JSON object; record it again")
    if not isinstance(header["kernel"], str):
        raise RecordingError(f"{path}: the header's 'kernel' is not a name; record it again")
    for role, by_batch_size in header.get("roofline_us", {}).items():
        if not isinstance(by_batch_size, dict) or not all(_is_time(us) for us in by_batch_size.values()):
            raise RecordingError(f"{path}: the header's roofline_us of {role!r} holds no times; record it again")


def _row(path: Path, number: int, data: Mapping[str, Any]) -> RecordedConfig:
    try:
        status = data["status"]
        if status not in STATUSES:
            raise ValueError(f"status is {status!r}, not one of {', '.join(STATUSES)}")
        compile_s = float(data.get("compile_s") or 0.0)
        roles: dict[Role, RecordedRole] = {
            role: _role(data[role], compile_s) for role in ROLES if role in data or status == "ok"
        }
        error = data.get("error")
        return RecordedConfig(
            config=LaunchConfig.from_dict(data["config"]),
            status=status,
            error=None if error is None else str(error),
            roles=roles,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordingError(f"{path}: line {number} cannot be used ({error!r}); record it again") from None


def _role(part: Mapping[str, Any], compile_s: float) -> RecordedRole:
    us: dict[int, tuple[float, ...]] = {}
    for batch_size, times in part["us"].items():
        if int(batch_size) < 1 or not isinstance(times, list) or not times or not all(_is_time(t) for t in times):
            raise ValueError(f"times of batch size {batch_size!r} are {times!r}"[:120])
        us[int(batch_size)] = tuple(float(t) for t in times)
    relative_error = part.get("relative_error")
    if relative_error is not None:
        relative_error = float(relative_error)
    resources = Resources(int(part["registers"]), int(part["spills"]), int(part["shared_bytes"]), compile_s)
    return RecordedRole(resources, relative_error, us)


def _is_time(value: Any) -> bool:
    """Whether it is a number of microseconds: positive and under 30 years. By type, as true is an int."""
    return type(value) in (int, float) and 0 < value < 1e15
