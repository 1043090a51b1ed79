"""Bundle of a recording to be shared: versions and clocks stay, names and paths go."""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from moeopt import engines
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape
from moeopt.errors import ExportError
from moeopt.files import json_lines, write_file
from moeopt.recordings.format import Header, RecordedConfig, RecordedRole, Recording, read_lines

_VERSIONS: Final = ("triton", "torch", "driver", "cuda", "moeopt", "python")
_ROLE: Final = tuple(name for name in RecordedRole.__struct_fields__ if name != "rejected")
_CLOCKS: Final = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
_ROOT: Final = r"(?:[A-Za-z]:\\|\\\\|~/|/)"
# In quotes as Python writes them a path may hold spaces.
_PATH: Final = re.compile(
    rf"(?<='){_ROOT}[^'\n]+(?=')|(?<=\"){_ROOT}[^\"\n]+(?=\")|{_ROOT}[\w.@+~-]+(?:[/\\][\w.@+~-]+)*"
)


def bundle_recording(path: str | Path, out: str | Path | None = None) -> Path:
    """Writes a copy that holds only what a recording needs, without names of host, user or paths.

    Only known keys are copied; in what is free text (errors), paths and the names of this host and
    user are replaced.

    Args:
        path: A recording.
        out: Where the copy goes; None for ``<name>-contribution.jsonl.gz`` beside it.

    Returns:
        The path of the copy.

    Raises:
        RecordingError: The file is not a recording.
        ExportError: The copy cannot be written.
    """
    path = Path(path)
    Recording.load(path)
    target = Path(out) if out is not None else path.with_name(_stem(path) + "-contribution.jsonl.gz")
    if target.resolve() == path.resolve():
        raise ExportError(f"{target} is the recording itself: give another path for the copy")
    clean = _Cleaner()
    header, *rows = read_lines(path)
    write_file(target, json_lines([clean.header(header), *(clean.row(row) for row in rows)]))
    return target


class _Cleaner:
    def __init__(self) -> None:
        names = {socket.gethostname(), socket.gethostname().split(".")[0], Path.home().name}
        try:
            names.add(getpass.getuser())
        except (OSError, KeyError):  # a user without a name
            names.discard("")
        words = sorted((re.escape(name) for name in names if len(name) > 1), key=len, reverse=True)
        self._names = re.compile(rf"\b(?:{'|'.join(words)})\b") if words else None

    def text(self, value: Any) -> Any:
        """Free text without paths and names; numbers as they are."""
        if not isinstance(value, str):
            return value
        # Names first: one with a space in it would end its path early.
        value = self._names.sub("NAME", value) if self._names else value
        return _PATH.sub("PATH", value)

    def header(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """The first line."""
        out = _only(header, Header.__struct_fields__)
        out["shape"] = MoEShape.from_dict(header["shape"]).to_dict()
        out["gpu"] = _only(header["gpu"], [field.name for field in fields(GpuSpec)])
        out["versions"] = {
            k: self.text(v) for k, v in _only(header["versions"], (*_VERSIONS, *engines.names())).items()
        }
        if "clocks" in out:
            out["clocks"] = _only(header["clocks"], _CLOCKS)
        for key in ("kernel", "timing"):
            if key in out:
                out[key] = self.text(out[key])
        # A routing drawn from a file is named by its path.
        if str(out.get("routing", "")).startswith("file:"):
            out["routing"] = "file"
        return out

    def row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One config."""
        out = {key: self.text(value) for key, value in _only(row, RecordedConfig.__struct_fields__).items()}
        return out | {role: _only(row[role], _ROLE) for role in ROLES if role in row}


def _only(data: Mapping[str, Any], keys: Any) -> dict[str, Any]:
    return {key: data[key] for key in keys if key in data}


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
