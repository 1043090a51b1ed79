"""Names of the config files that the engines look for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moeopt import engines
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.engines.file_names import FileName
from moeopt.errors import InvalidInputError, UnknownGpuError

# The three editions report three names, so a file tuned on one is not found on another.
RTX_PRO_6000_EDITIONS: Final[tuple[str, ...]] = (
    "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition",
    "NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition",
    "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition",
)
_FAMILIES: Final[tuple[tuple[str, ...], ...]] = (
    RTX_PRO_6000_EDITIONS,
    ("NVIDIA_H200", "NVIDIA_H200_NVL"),
    ("NVIDIA_H20", "NVIDIA_H20-3e"),
    ("NVIDIA_H100_80GB_HBM3", "NVIDIA_H100", "NVIDIA_H100_PCIe", "NVIDIA_H100_NVL"),
    ("NVIDIA_A100-SXM4-80GB", "NVIDIA_A100-SXM4-40GB", "NVIDIA_A100_80GB_PCIe", "NVIDIA_A800-SXM4-80GB"),
)


@dataclass(frozen=True)
class ConfigName(FileName):
    """What the name of a config file says, as one engine spells it.

    Attributes:
        engine: Whose spelling it has.
    """

    engine: str = field(kw_only=True)

    @classmethod
    def of(cls, engine: str, shape: MoEShape, gpu_name: str, role: Role = "up") -> ConfigName:
        """The name that an engine asks for.

        Args:
            engine: Its name.
            shape: The layer as one GPU sees it.
            gpu_name: The GPU's name as torch reports it, or as file names have it.
            role: Which projection; the same name for both where one file serves both.

        Raises:
            InvalidInputError: The engine is unknown, or it has no file for such a shape or device name.
        """
        return cls(**vars(engines.get(engine).names.of(shape, gpu_name, role)), engine=engine)

    @classmethod
    def parse(cls, name: str, engine: str | None = None) -> ConfigName:
        """Reads a file name.

        Args:
            name: The name without directories.
            engine: Whose spelling to expect; None takes the first whose spelling it is.

        Raises:
            InvalidInputError: No engine reads a file of this name; the message says what is wrong.
        """
        spec = engines.get(engine) if engine is not None else next(iter(spelled_by(name)), engines.every()[0])
        parsed = cls(**vars(spec.names.parse(name, spec.title)), engine=spec.name)
        asked = str(replace(parsed, device=spec.names.device_name(parsed.device)))
        if asked != name:
            raise InvalidInputError(f"{name!r} is never asked for: {spec.name} writes it {asked!r}")
        return parsed

    def __str__(self) -> str:
        return engines.get(self.engine).names.write(self)

    def for_role(self, role: Role) -> ConfigName:
        """The name of a role's file (the same for both where one file serves both)."""
        return replace(self, down=role == "down" and engines.get(self.engine).split)


def spelled_by(name: str) -> list[engines.EngineSpec]:
    """The engines that spell names like this one; what GPU it is for is not looked at."""
    found = []
    for spec in engines.every():
        try:
            spec.names.parse(name, spec.title)
        except InvalidInputError:
            continue
        found.append(spec)
    return found


def full_gpu_name(name: str) -> str:
    """A GPU's name as torch reports it: ``h200`` is NVIDIA H200. A name with its maker stays as it is."""
    if name.replace("_", " ").split(" ")[0].upper() in ("NVIDIA", "AMD", "INTEL(R)"):
        return name
    if re.fullmatch(r"MI\d{3}[A-Z]", name.upper()):
        return f"AMD Instinct {name.upper()}"
    try:
        return GpuSpec.by_name(name).name
    except UnknownGpuError:
        return name


def device_relatives(device: str) -> tuple[str, ...]:
    """Other device names of the same silicon: another edition, or another spelling of the name.

    Args:
        device: A device name with underscores.
    """
    for family in _FAMILIES:
        if device in family:
            return tuple(name for name in family if name != device)
    return ()


def nearest_key(keys: Sequence[int], batch_size: int) -> int:
    """The batch size whose config the engines use: the nearest, of two the first in the file.

    Args:
        keys: Batch sizes in the order of the file, at least one.
        batch_size: Tokens in the forward pass.
    """
    return min(keys, key=lambda key: abs(key - batch_size))
