"""Study files: a TOML file that says what to tune, for a deployment that comes back.

[shape]                     # the fields of MoEShape
num_experts = 256
...
[tune]                      # the options of tune()
trials = 24
[replay]                    # used where there is no GPU, and said so
recording = "NAME.jsonl.gz"
[export]
engine = "sglang"
directory = "out"           # relative to the study file
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moeopt import engines
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.errors import InvalidInputError
from moeopt.recordings.shipped import find_recording
from moeopt.tuning.options import TuneOptions, parse_timeout

_TUNE_KEYS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "batch_sizes": list,
    "gpu": str,
    "kernel": str,
    "mode": str,
    "space": str,
    "trials": int,
    "timeout": (int, float, str),
    "storage": str,
    "routing": str,
    "seed": int,
    "workers": int,
}
_SECTIONS: Final = ("description", "shape", "tune", "replay", "export")


@dataclass(frozen=True)
class StudyFile:
    """A study file, read and checked.

    Attributes:
        path: Where it lies.
        description: One line for people.
        shape: The layer.
        tune: Options of tune(), of the right types.
        recording: What is replayed where there is no GPU, or None.
        export_engine: ``sglang``, ``vllm`` or None.
        export_directory: Where its files go.
    """

    path: Path
    description: str
    shape: MoEShape
    tune: Mapping[str, Any] = field(default_factory=dict)
    recording: Path | None = None
    export_engine: str | None = None
    export_directory: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> StudyFile:
        """Reads a study file.

        Raises:
            InvalidInputError: It is missing, not TOML, or holds an unknown key or a value of another type.
        """
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidInputError(f"{path}: no such study file; give the path of a TOML file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"{path}: cannot be read ({error}); give the path of a TOML file") from None
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(f"{path}: not TOML: {error}") from None
        try:
            return cls._from_data(path, data)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None

    @classmethod
    def _from_data(cls, path: Path, data: Mapping[str, Any]) -> StudyFile:
        _known("section", data, _SECTIONS)
        for name in _SECTIONS[1:]:
            if not isinstance(data.get(name, {}), dict):
                raise InvalidInputError(f"{name!r} must be a section: write [{name}]")
        if "shape" not in data:
            raise InvalidInputError("section [shape] is missing: give num_experts, top_k, hidden_size, ...")
        options = data.get("tune", {})
        _known("key of [tune]", options, _TUNE_KEYS)
        for key, value in options.items():
            if isinstance(value, bool) or not isinstance(value, _TUNE_KEYS[key]):
                raise InvalidInputError(f"{key} in [tune] is {value!r}: a {_type_name(_TUNE_KEYS[key])} is expected")
        replay, export = data.get("replay", {}), data.get("export", {})
        _known("key of [replay]", replay, ("recording",))
        _known("key of [export]", export, ("engine", "directory"))
        for section, name in ((replay, "recording"), (export, "engine"), (export, "directory")):
            if name in section and not isinstance(section[name], str):
                raise InvalidInputError(f"{name} is {section[name]!r}: a text is expected")
        description = data.get("description", "")
        if not isinstance(description, str):
            raise InvalidInputError(f"description is {description!r}: a text is expected")
        shape = MoEShape.from_dict(data["shape"])
        _check_values(shape, options, export)
        return cls(
            path=path,
            description=description,
            shape=shape,
            tune=dict(options),
            recording=find_recording(replay["recording"], path.parent) if "recording" in replay else None,
            export_engine=export.get("engine"),
            export_directory=path.parent / export["directory"] if "directory" in export else None,
        )


def _check_values(shape: MoEShape, options: Mapping[str, Any], export: Mapping[str, Any]) -> None:
    """What a tune would refuse, or could not write at its end: said of the file, whichever command reads it."""
    given = {key: options[key] for key in ("mode", "space", "trials", "seed") if key in options}
    TuneOptions(tuple(options.get("batch_sizes", (1,))), timeout=parse_timeout(options.get("timeout")), **given)
    SearchSpace.named(options.get("space", "grid"), shape)
    if options.get("workers", 1) < 1:
        raise InvalidInputError(f"workers is {options['workers']}: give at least 1 compile process")
    if len(export) == 1:
        raise InvalidInputError(f"[export] holds only {next(iter(export))}: give engine and directory")
    if export:
        engines.get(export["engine"])


def _known(what: str, given: Mapping[str, Any], known: Any) -> None:
    for key in given:
        if key not in known:
            raise InvalidInputError(f"{what} {key!r} is unknown: known are {', '.join(known)}")


def _type_name(kind: type | tuple[type, ...]) -> str:
    names = {list: "list", str: "text", int: "whole number", float: "number"}
    return " or ".join(names[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
