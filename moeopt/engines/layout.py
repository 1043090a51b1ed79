"""Directories in which an engine looks for config files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeopt.errors import ExportError

_RELEASE: Final = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True)
class Layout:
    """Where files lie below the root, which is the directory that the engine's variable names.

    Without a prefix all of them lie in it. With one, each Triton version has a directory, such as
    ``configs/triton_3_6_0``; one of that prefix whose rest is not numbers makes the engine's loader
    raise for every file that it has to look for. Another layout is a subclass.

    Attributes:
        parent: The directory below the root that holds those of the Triton versions.
        prefix: Of their names.
        separator: Between the numbers of a version.
    """

    parent: str = ""
    prefix: str = ""
    separator: str = "_"

    @property
    def versioned(self) -> bool:
        """Whether the files of each Triton version have a directory of their own."""
        return bool(self.prefix)

    @property
    def folders(self) -> tuple[str, ...]:
        """Where files may lie below the root, as patterns that are empty or end with a slash."""
        return ("", f"{self.parent}/*/", f"{self.parent}/") if self.versioned else ("",)

    @property
    def example(self) -> str:
        """Where files belong below the root, for messages."""
        return f"{self.parent}/{self.prefix}{self.separator.join('XYZ')}/" if self.versioned else "./"

    def root(self, path: Path) -> Path:
        """The root of a directory of files: itself, or one above it. A root may have the name of its own part."""
        if self.parent and self.version_folders(path):
            return path
        if self.is_version(path.name) and path.parent.name == self.parent:
            return path.parent.parent
        return path.parent if path.name and path.name == self.parent else path

    def shelf(self, root: Path) -> Path:
        """The directory that a root has where the engine ships files in it."""
        return root / self.parent

    def place(self, root: Path, triton_version: str) -> Path:
        """The directory that files are written into and looked for first.

        Raises:
            ExportError: The version does not begin with a number, where it is part of the path.
        """
        if not self.versioned:
            return root
        match = _RELEASE.match(triton_version)
        if match is None:
            raise ExportError(f"Triton version {triton_version!r} has no number: give one such as 3.6.0")
        return self.shelf(root) / (self.prefix + match[0].replace(".", self.separator))

    def is_version(self, folder: str) -> bool:
        """Whether a directory of this name is taken for that of a Triton version, be its rest numbers or not."""
        return self.versioned and folder.startswith(self.prefix)

    def version_of(self, folder: str) -> tuple[int, ...] | None:
        """The Triton version of a directory's name, None where it is of none."""
        parts = folder.removeprefix(self.prefix).split(self.separator)
        if not self.is_version(folder) or not all(p.isascii() and p.isdigit() for p in parts):
            return None
        return tuple(int(p) for p in parts)

    def version_folders(self, root: Path) -> list[Path]:
        """The directories of Triton versions, those whose version is not numbers among them."""
        return sorted(d for d in self.shelf(root).glob(f"{self.prefix}*") if d.is_dir()) if self.versioned else []

    def marks(self, path: Path) -> bool:
        """Whether a directory can only be one of this layout."""
        inside = path.parent if path.name == self.parent else path
        return self.is_version(path.name) or bool(self.version_folders(inside))
