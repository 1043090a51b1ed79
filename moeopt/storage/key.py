"""Keys of studies: which measurements belong together."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell
from moeopt.measure.base import Device

# Raised whenever stored trials change their meaning.
FORMAT_VERSION: Final = 1
_STUDY_NAME_LIMIT: Final = 512


@dataclass(frozen=True)
class StudyKey:
    """What a time is a property of, apart from the launch config and the cell.

    The space is not part of it: a config timed for one space is as good for another.

    Attributes:
        shape: The layer.
        gpu: Name of the GPU.
        provenance: Kernel, versions, routing.
        mode: ``split`` or ``joint``.
        format: Version of what is stored.
    """

    shape: MoEShape
    gpu: str
    provenance: Provenance
    mode: str = "split"
    format: int = FORMAT_VERSION

    @classmethod
    def of(cls, device: Device, mode: str) -> StudyKey:
        """The key of what a device measures."""
        return cls(device.spec.shape, device.spec.gpu.name, device.spec.provenance, mode)

    @property
    def digest(self) -> str:
        """Six hex digits of the whole key: what the words of a study's name do not say."""
        text = json.dumps(self.attrs(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:6]

    def title(self) -> str:
        """Shape, GPU, kernel, Triton and, where not uniform, routing, in words that sort well."""
        made = self.provenance
        gpu = self.gpu + (" (recorded)" if made.recorded else "")
        parts = [self.shape.slug(), gpu, made.kernel, f"triton {made.triton or '?'}"]
        if made.routing_title != "uniform":
            parts.append(made.routing_title)
        return " | ".join(part.replace("|", "/") for part in parts)

    def study_name(self, cell: Cell) -> str:
        """Name of the Optuna study of one cell.

        Such as ``E256-top8-K3072-N256-bf16 | NVIDIA H200 | builtin | triton 3.6.0 | up | M=00064 | 3f9a2c``.
        The last word is the key's digest: a study of the same words with, say, another driver is
        another study.
        """
        tail = f" | {cell.role} | M={cell.batch_size:05d} | {self.digest}"
        return self.title()[: _STUDY_NAME_LIMIT - len(tail)] + tail

    def attrs(self) -> dict[str, Any]:
        """The exact key, JSON-ready, as the study's user attributes hold it."""
        made = self.provenance.to_dict()
        return {"shape": self.shape.to_dict(), "gpu": self.gpu, **made, "mode": self.mode, "format": self.format}

    @classmethod
    def from_attrs(cls, attrs: Mapping[str, Any]) -> StudyKey | None:
        """The inverse of :meth:`attrs`; None where these are not the attributes of one of our studies."""
        try:
            made = Provenance.from_dict(attrs)
            return cls(MoEShape.from_dict(attrs["shape"]), attrs["gpu"], made, attrs["mode"], attrs["format"])
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def difference(self, other: StudyKey) -> str:
        """What differs, in words: ``driver is 580.1, was 570.2``; "" where nothing does."""
        mine, theirs = self.attrs(), other.attrs()
        mine["shape"], theirs["shape"] = self.shape.slug(), other.shape.slug()
        return "; ".join(
            f"{name.replace('_', ' ')} is {mine[name]!s}, was {theirs[name]!s}"
            for name in mine
            if mine[name] != theirs[name]
        )


def cell_of(attrs: Mapping[str, Any]) -> Cell | None:
    """The cell that a study's user attributes name, or None."""
    role, batch_size = attrs.get("role"), attrs.get("batch_size")
    if role not in ("up", "down", "joint") or not isinstance(batch_size, int):
        return None
    return Cell(role, batch_size)


def words(name: str) -> str:
    """A study's name without the digest at its end."""
    return re.sub(r" \| [0-9a-f]{6}$", "", name)
