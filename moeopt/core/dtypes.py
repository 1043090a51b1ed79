"""Quantisation schemes: what a scheme's activations and weights are, and which scales they may have, one row each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Compute = Literal["bf16", "fp16", "fp8", "int8"]
# One scale for all, per output channel (and token), per block of the weights, per group of K of 16-bit activations.
Scales = Literal["none", "tensor", "channel", "block", "group"]
_BITS: Final = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class DTypeSpec:
    """One quantisation scheme.

    Attributes:
        compute: Type of the activations, which the tensor cores multiply.
        weight: Type of the weights as stored.
        scales: The layouts of scales that a layer may have; the first is that of a shape that names none.
        activation_bits: Bits of one element of the activations.
        weight_bits: Bits of one element of the weights.
        weight_only: Whether the weights have fewer bits than the activations: a kernel converts them in registers.
    """

    compute: Compute
    weight: Literal["bf16", "fp16", "fp8", "int8", "int4"]
    scales: tuple[Scales, ...] = ("none",)
    activation_bits: int = field(init=False)
    weight_bits: int = field(init=False)
    weight_only: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "activation_bits", _BITS[self.compute])
        object.__setattr__(self, "weight_bits", _BITS[self.weight])
        object.__setattr__(self, "weight_only", _BITS[self.weight] < _BITS[self.compute])


DTYPES: Final[dict[str, DTypeSpec]] = {
    "bf16": DTypeSpec("bf16", "bf16"),
    "fp16": DTypeSpec("fp16", "fp16"),
    "fp8_w8a8": DTypeSpec("fp8", "fp8", ("tensor", "channel", "block")),
    "int8_w8a8": DTypeSpec("int8", "int8", ("tensor", "channel", "block")),
    "int8_w8a16": DTypeSpec("bf16", "int8", ("channel", "group")),
    "int4_w4a16": DTypeSpec("bf16", "int4", ("group",)),
}


def dtypes_with(scales: Scales) -> str:
    """The schemes that may have such scales, for messages."""
    *names, last = sorted(name for name, spec in DTYPES.items() if scales in spec.scales)
    return f"{', '.join(names)} and {last}"
