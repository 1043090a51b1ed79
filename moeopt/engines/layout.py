"""Directories in which an engine looks for config files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeopt.errors import ExportError

_RELEASE: Final = re.compile(r"\d+(?:\.\d+)*")

Version = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """All files lie in the very directory that the engine's variable names."""

    @property
    def versioned(self) -> bool:
        """Whether the files of each Triton version have a directory of their own."""
        return False

    @property
    def folders(self) -> tuple[str, ...]:
        """Where files may lie below the root, as patterns that are empty or end with a slash."""
        return ("",)

    @property
    def example(self) -> str:
        """Where files belong below the root, for messages."""
        return "."

    def root(self, path: Path) -> Path:
        """What the variable has to name for the files in or below a directory."""
        return path

    def shelf(self, root: Path) -> Path:
        """The directory that a root has where the engine ships files in it."""
        return root

    def place(self, root: Path, triton_version: str) -> Path:
        """The directory that files are written into and looked for first.

        Raises:
            ExportError: The version does not begin with a number, where it is part of the path.
        """
        return root

    def is_version(self, folder: str) -> bool:
        """Whether a directory of this name is taken for that of a Triton version, be its rest numbers or not."""
        return False

    def marks(self, path: Path) -> bool:
        """Whether a directory can only be one of this layout."""
        return False

    def version_of(self, folder: str) -> Version | None:
        """The Triton version of a directory's name, None where it is of none."""
        return None

    def version_folders(self, root: Path) -> list[Path]:
        """The directories of Triton versions, those whose version is not numbers among them."""
        return []


@dataclass(frozen=True)
class VersionedLayout(Layout):
    """A directory for each Triton version, such as ``configs/triton_3_6_0``.

    A directory of that prefix whose rest is not numbers makes the engine's loader raise for every file
    that it has to look for.

    Attributes:
        parent: The directory that holds them, below the one that the variable names.
        prefix: Of their names.
        separator: Between the numbers of the version.
    """

    parent: str = "configs"
    prefix: str = "triton_"
    separator: str = "_"

    @property
    def versioned(self) -> bool:
        return True

    @property
    def folders(self) -> tuple[str, ...]:
        return ("", f"{self.parent}/*/", f"{self.parent}/")

    @property
    def example(self) -> str:
        return f"{self.parent}/{self.prefix}{self.separator.join('XYZ')}/"

    def root(self, path: Path) -> Path:
        if self.is_version(path.name) and path.parent.name == self.parent:
            return path.parent.parent
        return path.parent if path.name == self.parent else path

    def shelf(self, root: Path) -> Path:
        return root / self.parent

    def place(self, root: Path, triton_version: str) -> Path:
        match = _RELEASE.match(triton_version)
        if match is None:
            raise ExportError(f"Triton version {triton_version!r} has no number: give one such as 3.6.0")
        return self.shelf(root) / (self.prefix + match[0].replace(".", self.separator))

    def is_version(self, folder: str) -> bool:
        return folder.startswith(self.prefix)

    def marks(self, path: Path) -> bool:
        inside = path if path.name == self.parent else self.shelf(path)
        return self.is_version(path.name) or (inside.is_dir() and any(inside.glob(f"{self.prefix}*")))

    def version_of(self, folder: str) -> Version | None:
        parts = folder.removeprefix(self.prefix).split(self.separator)
        if not self.is_version(folder) or not all(p.isascii() and p.isdigit() for p in parts):
            return None
        return tuple(int(p) for p in parts)

    def version_folders(self, root: Path) -> list[Path]:
        return sorted(d for d in self.shelf(root).glob(f"{self.prefix}*") if d.is_dir())
