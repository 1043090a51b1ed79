"""Names of config files: what one says, and the rule by which an engine writes it.

A file whose name differs in one character is never read, and no engine says more than one warning line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from moeopt.core.dtypes import DTYPES
from moeopt.core.shape import MoEShape, Role
from moeopt.errors import InvalidInputError

_NAME: Final = re.compile(
    r"E=(?P<e>\d+),N=(?P<n>\d+),device_name=(?P<device>[^,]+?)"
    r"(?:,dtype=(?P<dtype>[^,]+?))?"
    r"(?:,block_shape=\[(?P<bn>\d+)(?P<separator>, ?)(?P<bk>\d+)\])?"
    r"(?P<channel>,per_channel_quant=True)?"
    r"(?P<down>_down)?\.json"
)


@dataclass(frozen=True)
class FileName:
    """What the name of a config file says.

    Attributes:
        num_experts: E, first dimension of the weights.
        intermediate_size: N as the engine counts it (where int4 is packed: half the elements).
        device: The GPU's name as the engine writes it.
        dtype: The engine's word for the scheme, or None.
        block_shape: (block_n, block_k), or None.
        per_channel: Whether scales per channel are in the name.
        down: Whether it is the file of the down projection alone.
    """

    num_experts: int
    intermediate_size: int
    device: str
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    down: bool = False


@dataclass(frozen=True)
class FileNames:
    """An engine's rule for file names, in the form ``E=..,N=..,device_name=..``; another form is a subclass.

    Attributes:
        device: The GPU's name as torch reports it -> in file names.
        words: dtype of a shape -> word in the name, where it is not the dtype itself.
        other_words: Words that the engine has beyond those of the dtypes that are tuned here.
        separator: Between the two sizes of ``block_shape``.
        per_channel: Whether ``per_channel_quant=True`` is written.
        split: Whether each projection has a file, ``_down`` the second; else one file serves both.
        packed_int4: Whether N counts bytes where two int4 weights share one.
        pattern: What every name fits.
    """

    device: Callable[[str], str]
    words: Mapping[str, str | None] = field(default_factory=dict)
    other_words: frozenset[str] = frozenset({"float32"})
    separator: str = ","
    per_channel: bool = False
    split: bool = False
    packed_int4: bool = False
    pattern: str = "E=*.json"

    def word(self, dtype: str) -> str | None:
        """The engine's word for a dtype of :data:`~moeopt.core.dtypes.DTYPES`; 16-bit weights have none."""
        return self.words.get(dtype, None if DTYPES[dtype].weight_bits == 16 else dtype)

    @property
    def known_words(self) -> frozenset[str | None]:
        """Every word that the engine can ask for, None for no word."""
        return self.other_words | {self.word(dtype) for dtype in DTYPES}

    def device_name(self, gpu_name: str) -> str:
        """The device name as the engine writes it.

        Raises:
            InvalidInputError: The name is empty, or cannot be part of a file name.
        """
        if not gpu_name.strip() or any(c in gpu_name for c in "\0\n\r,"):
            raise InvalidInputError(f"GPU name {gpu_name!r} cannot be in a file name: give it as torch reports it")
        return self.device(gpu_name)

    def of(self, shape: MoEShape, gpu_name: str, role: Role = "up") -> FileName:
        """The name that the engine asks for.

        Args:
            shape: The layer as one GPU sees it.
            gpu_name: The GPU's name as torch reports it, or as file names have it.
            role: Which projection.

        Raises:
            InvalidInputError: The engine has no file for such a shape or device name.
        """
        n = shape.intermediate_size
        if self.packed_int4 and shape.spec.weight == "int4":
            if n % 2:
                raise InvalidInputError(
                    f"intermediate_size {n} is odd: two int4 weights share a byte, so give an even one"
                )
            n //= 2
        return FileName(
            num_experts=shape.num_experts,
            intermediate_size=n,
            device=self.device_name(gpu_name),
            dtype=self.word(shape.dtype),
            block_shape=shape.block_shape,
            per_channel=shape.per_channel and self.per_channel,
            down=role == "down" and self.split,
        )

    def elements(self, name: FileName) -> int:
        """The intermediate size that a name means, in weights."""
        spec = DTYPES.get(name.dtype or "")
        return name.intermediate_size * (2 if self.packed_int4 and spec and spec.weight == "int4" else 1)

    def write(self, name: FileName) -> str:
        """The name as text."""
        text = f"E={name.num_experts},N={name.intermediate_size},device_name={name.device}"
        if name.dtype:
            text += f",dtype={name.dtype}"
        if name.block_shape and all(name.block_shape):
            text += f",block_shape=[{name.block_shape[0]}{self.separator}{name.block_shape[1]}]"
        if name.per_channel:
            text += ",per_channel_quant=True"
        return text + ("_down.json" if name.down else ".json")

    def parse(self, text: str, title: str) -> FileName:
        """What a name says.

        Args:
            text: The name without directories.
            title: The engine's, for messages.

        Raises:
            InvalidInputError: It is not spelled as this engine spells names.
        """
        match = _NAME.fullmatch(text)
        if match is None:
            raise InvalidInputError(
                f"{text!r} is not a config file name: expected "
                "E=..,N=..,device_name=..[,dtype=..][,block_shape=[128, 128]][,per_channel_quant=True][_down].json"
            )
        separator, foreign = match["separator"], ""
        if separator == "," != self.separator:
            raise InvalidInputError(
                f"{text!r} has no space inside block_shape: {title} asks for "
                f"block_shape=[{match['bn']}{self.separator}{match['bk']}]"
            )
        if separator not in (None, self.separator):
            foreign = "a space inside block_shape"
        elif (match["channel"] and not self.per_channel) or (match["down"] and not self.split):
            foreign = "per_channel_quant or _down"
        if foreign:
            raise InvalidInputError(f"{text!r} has {foreign}: {title} never asks for such a name")
        return FileName(
            num_experts=int(match["e"]),
            intermediate_size=int(match["n"]),
            device=match["device"],
            dtype=match["dtype"],
            block_shape=(int(match["bn"]), int(match["bk"])) if match["bn"] else None,
            per_channel=bool(match["channel"]),
            down=bool(match["down"]),
        )
