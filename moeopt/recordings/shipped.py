"""Recordings that moeopt ships, and where others are found."""

from __future__ import annotations

from pathlib import Path

from moeopt.errors import InvalidInputError


def find_recording(name: str, base: Path | None = None) -> Path:
    """The path of a recording: as given, beside ``base``, or one that moeopt ships.

    Raises:
        InvalidInputError: There is none of that name.
    """
    shipped = shipped_recordings()
    for path in (Path(name), (base or Path()) / name, (base or Path()) / "recordings" / name):
        if path.is_file():
            return path
    if name in shipped:
        return shipped[name]
    raise InvalidInputError(
        f"recording {name!r} was not found: give a path, or a shipped one ({', '.join(sorted(shipped)) or 'none'})"
    )


def shipped_recordings() -> dict[str, Path]:
    """The recordings in the package, by file name."""
    return {path.name: path for path in sorted(shipped_directory().glob("*.jsonl.gz"))}


def shipped_directory() -> Path:
    """The directory of the recordings in the package."""
    return Path(__file__).parent / "data"
