"""GPUs that are described by hand: ``key=value,...`` or a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from moeopt.core.fields import check_keys
from moeopt.errors import InvalidInputError

EXAMPLE: Final = (
    "name=NVIDIA X,compute_capability=12.0,multiprocessors=100,memory_bytes=48GiB,l2_bytes=96MiB,"
    "bandwidth_gbps=1344,bf16_tflops=250,fp8_tflops=500,int8_tops=500, or name=NVIDIA X,like=NVIDIA GeForce RTX 5090 "
    "and what differs"
)
_UNITS: Final = {"": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


def is_by_hand(text: str) -> bool:
    """Whether a text describes a GPU instead of naming one."""
    return text.endswith(".toml") or "=" in text


def read_by_hand(text: str, fields: Collection[str]) -> dict[str, Any]:
    """The fields of a GPU that a text or the file that it names gives.

    Sizes may have a unit, as in ``96MiB``; a compute capability may be one number, as in ``12.0``.

    Args:
        text: ``key=value,...`` or the path of a TOML file.
        fields: Keys that may be given; ``like`` may be, too.

    Raises:
        InvalidInputError: The file cannot be read, a key is unknown or given twice, or the name is missing.
    """
    where = f"{text}: " if text.endswith(".toml") else ""
    given = _from_file(Path(text)) if where else _from_text(text)
    try:
        values = check_keys(given, [*fields, "like"], "GPU")
    except InvalidInputError as error:
        raise InvalidInputError(f"{where}{error}") from None
    if not isinstance(values.get("name"), str) or not values["name"]:
        raise InvalidInputError(f"{where}the GPU's name is missing: give it as torch reports it, such as {EXAMPLE}")
    return {key: _value(key, value) for key, value in values.items()}


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path}: the GPU's file cannot be read ({error}): give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{path}: not TOML: {error}") from None


def _from_text(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals or not key or not value:
            raise InvalidInputError(f"{part!r} of the GPU is not key=value: give it as in {EXAMPLE}")
        if key in given:
            raise InvalidInputError(f"{key} of the GPU is given twice: give it once")
        given[key] = value
    return given


def _value(key: str, value: Any) -> Any:
    """A text as the number, pair or size that it is; what is none stays, and the field's check says so."""
    if key in ("name", "like"):
        return value
    text = str(value).strip()
    if key == "compute_capability" and (pair := re.fullmatch(r"(\d+)\.(\d+)", text)):
        return int(pair[1]), int(pair[2])
    if not isinstance(value, str):
        return value
    if key == "unified_memory" and text in ("true", "false"):
        return text == "true"
    if size := re.fullmatch(r"(\d+) *([kmg]ib|)", text, re.IGNORECASE):
        return int(size[1]) * _UNITS[size[2].lower()]
    try:
        return float(text)
    except ValueError:
        return text
