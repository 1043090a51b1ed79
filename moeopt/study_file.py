"""Study file: TOML that says what to tune, for a deployment that comes back.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeopt import engines
from moeopt.core.fields import check_keys, checked, from_mapping
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.errors import InvalidInputError
from moeopt.recordings.shipped import find_recording
from moeopt.tuning.options import TuneRequest


@dataclass(frozen=True)
class _Replay:
    recording: str


@dataclass(frozen=True)
class _Export:
    engine: str
    directory: str


@dataclass(frozen=True)
class StudyFile:
    """A study file, read and checked.

    Attributes:
        path: Where it lies.
        description: One line for people.
        tune: What is tuned: shape, options, and what is replayed where there is no GPU.
        export_engine: ``sglang``, ``vllm`` or None.
        export_directory: Where its files go.
    """

    path: Path
    description: str
    tune: TuneRequest
    export_engine: str | None = None
    export_directory: Path | None = None

    @property
    def shape(self) -> MoEShape:
        """The layer."""
        assert self.tune.shape is not None  # a study file has a shape
        return self.tune.shape

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
        sections = check_keys(data, ("description", "shape", "tune", "replay", "export"), "study file")
        if "shape" not in sections:
            raise InvalidInputError("section [shape] is missing: give num_experts, top_k, hidden_size, ...")
        shape = MoEShape.from_dict(sections["shape"])
        replay = from_mapping(_Replay, sections["replay"], "[replay]") if "replay" in sections else None
        export = from_mapping(_Export, sections["export"], "[export]") if "export" in sections else None
        stand_in = find_recording(replay.recording, path.parent) if replay is not None else None
        tune = TuneRequest(shape, stand_in=stand_in).with_options(sections.get("tune", {}), "[tune]")
        # What a tune would refuse, or could not write at its end, is said of the file, whichever command reads it.
        SearchSpace.named(tune.search.space, shape)
        return cls(
            path=path,
            description=checked(sections.get("description", ""), str, "description"),
            tune=tune,
            export_engine=engines.get(export.engine).name if export is not None else None,
            export_directory=path.parent / export.directory if export is not None else None,
        )
