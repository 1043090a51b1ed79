"""Names of GPUs: how they are compared, those of parts of a GPU, and those that were meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from moeopt.core.gpu_table import VGPU_BOARDS

_MIG: Final = re.compile(r"(.+?) mig (\dc\.)?(\d)g\.(\d+)gb([+-][a-z.+-]+)?", re.IGNORECASE)
_VGPU: Final = re.compile(r"(?:grid |nvidia )?([\w ]+?)(?:-(\d))?-(\d+)[abcq](me)?", re.IGNORECASE)


@dataclass(frozen=True)
class GpuPart:
    """What the name of a MIG instance or a virtual GPU says.

    Attributes:
        board: Name of the GPU that it is a part of.
        gib: Its memory as the name has it.
        slices: Compute slices of a MIG instance; None for a virtual GPU that has all multiprocessors in its turn.
        whole_instance: Whether it is all of a MIG instance, not one of several compute instances in it.
    """

    board: str
    gib: int
    slices: int | None
    whole_instance: bool = True


def name_key(name: str) -> str:
    """What is compared of a name: case, underscores and the vendor do not matter."""
    words = name.lower().replace("_", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "geforce"))


def part_of(name: str) -> GpuPart | None:
    """Reads ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``, ``GRID A100D-40C`` or ``GRID A100D-1-10C``; None for others."""
    text = " ".join(name.replace("_", " ").split())
    if mig := _MIG.fullmatch(text):
        return GpuPart(mig[1], int(mig[4]), int(mig[3]), whole_instance=mig[2] is None)
    if vgpu := _VGPU.fullmatch(text):
        board = VGPU_BOARDS.get(vgpu[1].lower(), vgpu[1])
        return GpuPart(board, int(vgpu[3]), int(vgpu[2]) if vgpu[2] else None)
    return None


def names_like(name: str, known: Collection[str]) -> list[str]:
    """Known names that have all words of a name, else those that are spelled alike."""
    words = _words(name)
    found = [one for one in known if words and words <= _words(one)]
    if found:
        return found
    keys = {name_key(one): one for one in known}
    return [keys[key] for key in difflib.get_close_matches(name_key(name), keys, n=3, cutoff=0.75)]


def _words(name: str) -> set[str]:
    return set(name_key(name).replace("-", " ").split())
