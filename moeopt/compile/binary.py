"""Contents of a compiled binary, read from its PTX."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

# wgmma (Hopper), tcgen05 (data-centre Blackwell), mma (all others): opcode, tile and element types.
_INSTRUCTION: Final = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*")
_TILE: Final = re.compile(r"m\d+n\d+k\d+")
_TYPES: Final = ("e4m3", "e5m2", "bf16", "f16", "tf32", "s8", "u8", "f8f6f4", "i8")
_KINDS: Final = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma.sync": "mma"}


@dataclass(frozen=True, slots=True)
class TensorCore:
    """The tensor-core instruction of a binary.

    Attributes:
        kind: ``mma``, ``wgmma``, ``tcgen05``, or ``none``.
        tile: Such as ``m16n8k16``, or "" where the instruction does not name it.
        operands: Element type of its operands, such as ``bf16`` or ``e4m3``, or "".
        count: How often it stands in the code.
    """

    kind: str
    tile: str = ""
    operands: str = ""
    count: int = 0

    @property
    def fp8(self) -> bool:
        """Whether the operands are fp8."""
        return self.operands in ("e4m3", "e5m2", "f8f6f4")

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.tile, self.operands) if part)


def tensor_core(ptx: str) -> TensorCore:
    """The tensor-core instruction that stands most often in the code."""
    found: Counter[tuple[str, str, str]] = Counter()
    for match in _INSTRUCTION.finditer(ptx):
        words = match[0].replace("::", ".").split(".")
        tile = next((word for word in words if _TILE.fullmatch(word)), "")
        operands = next((word for word in words[1:] if word in _TYPES), "")
        found[(_KINDS[match[1]], tile, operands)] += 1
    if not found:
        return TensorCore("none")
    (kind, tile, operands), _ = found.most_common(1)[0]
    return TensorCore(kind, tile, operands, sum(found.values()))
