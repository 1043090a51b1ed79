"""Options that several commands share, and what they mean."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from moeopt.errors import InvalidInputError
from moeopt.export.names import check_engine
from moeopt.shape import MoEShape, check_batch_sizes

ModelOption = Annotated[
    Path | None, typer.Option("--model", help="A model's directory or config.json: the shape is read from it.")
]
EngineOption = Annotated[str, typer.Option("--engine", help="Whose rules give E and N of a model: sglang or vllm.")]
TpOption = Annotated[int, typer.Option("--tp", help="Tensor-parallel size, with --model.")]
EpOption = Annotated[int, typer.Option("--ep", help="Expert-parallel size, with --model.")]
FuseOption = Annotated[
    bool | None,
    typer.Option("--fuse-shared/--no-fuse-shared", help="Whether the engine fuses shared experts, with --model."),
]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="E: experts on this GPU.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Experts per token.")]
HiddenOption = Annotated[int | None, typer.Option("--hidden", help="K: hidden size.")]
IntermediateOption = Annotated[
    int | None, typer.Option("--intermediate", help="N: expert intermediate size on this GPU (after TP).")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="bf16, fp16, fp8_w8a8, int8_w8a8, int8_w8a16 or int4_w4a16."),
]
BlockShapeOption = Annotated[
    str | None, typer.Option("--block-shape", help="Block of the scales, such as 128,128.", metavar="N,K")
]
PerChannelOption = Annotated[bool, typer.Option("--per-channel", help="Scales per output channel and per token.")]
GroupSizeOption = Annotated[int | None, typer.Option("--group-size", help="Weights per scale of a weight-only scheme.")]
StorageOption = Annotated[
    str | None,
    typer.Option("--storage", help="Study database: a URL or a file. Default: studies/moeopt.db", metavar="URL"),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Which result, where the storage holds several: the key that moeopt status prints."),
]
ModeOption = Annotated[
    str | None, typer.Option("--mode", help="split or joint, where the storage holds both for the shape.")
]
BatchSizesOption = Annotated[
    str | None,
    typer.Option("--batch-sizes", help="Batch sizes, such as 1,8,64. Default: the 18 of the published tuners."),
]


@dataclass(frozen=True)
class ShapeOptions:
    """The shape options of a command line, as they were given."""

    model: Path | None = None
    engine: str = "sglang"
    tp: int = 1
    ep: int = 1
    fuse_shared: bool | None = None
    experts: int | None = None
    top_k: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    dtype: str | None = None
    block_shape: str | None = None
    per_channel: bool = False
    group_size: int | None = None

    def given(self) -> bool:
        """Whether any of them was given; an engine alone says nothing of a shape."""
        return replace(self, engine=ShapeOptions.engine) != ShapeOptions()

    def resolve(self) -> tuple[MoEShape, list[str]]:
        """The shape, and for a model the lines that say which key each number came from.

        Raises:
            InvalidInputError: Too little was given, or it does not fit together.
        """
        check_engine(self.engine)
        if self.model is not None:
            from moeopt.models import shape_from_model

            shape, derivation = shape_from_model(
                self.model,
                engine=self.engine,
                tp=self.tp,
                ep=self.ep,
                dtype=self.dtype,
                fuse_shared_experts=self.fuse_shared,
                overrides=self._overrides(),
            )
            return shape, list(derivation.lines)
        for option, value in (
            ("--experts", self.experts),
            ("--top-k", self.top_k),
            ("--hidden", self.hidden),
            ("--intermediate", self.intermediate),
        ):
            if value is None:
                raise InvalidInputError(
                    f"{option} is missing: give a study file, --model, or all of --experts, --top-k, --hidden, "
                    "--intermediate and --dtype"
                )
        if self.tp != 1 or self.ep != 1 or self.fuse_shared is not None:
            raise InvalidInputError(
                "--tp, --ep and --fuse-shared go with --model: with --experts and --intermediate give one GPU's sizes"
            )
        return (
            MoEShape(
                num_experts=self.experts or 0,
                top_k=self.top_k or 0,
                hidden_size=self.hidden or 0,
                intermediate_size=self.intermediate or 0,
                dtype=self.dtype or "bf16",
                block_shape=parse_block_shape(self.block_shape),
                per_channel=self.per_channel,
                group_size=self.group_size,
            ),
            [],
        )

    def _overrides(self) -> dict[str, object]:
        values = {
            "num_experts": self.experts,
            "top_k": self.top_k,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "block_shape": parse_block_shape(self.block_shape),
            "per_channel": self.per_channel or None,
            "group_size": self.group_size,
        }
        return {k: v for k, v in values.items() if v is not None}


def parse_block_shape(text: str | None) -> tuple[int, int] | None:
    """``128,128`` or ``[128, 128]`` as two numbers.

    Raises:
        InvalidInputError: It is something else.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*\[?\s*(\d+)\s*[,x]\s*(\d+)\s*\]?\s*", text)
    if not match:
        raise InvalidInputError(f"--block-shape is {text!r}: give two sizes such as 128,128")
    return int(match[1]), int(match[2])


def parse_batch_sizes(text: str | None) -> tuple[int, ...] | None:
    """``1,8,64`` as numbers.

    Raises:
        InvalidInputError: It is something else, or one is not positive.
    """
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidInputError(f"--batch-sizes is {text!r}: give whole numbers such as 1,8,64") from None
    return check_batch_sizes(sizes)
