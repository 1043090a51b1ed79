"""The shape of one MoE layer, as one GPU sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from moeopt.errors import InvalidInputError

Role = Literal["up", "down"]
ROLES: Final[tuple[Role, Role]] = ("up", "down")

# Batch sizes that the published tuners of SGLang and vLLM walk.
DEFAULT_BATCH_SIZES: Final[tuple[int, ...]] = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip


# A forward pass of more tokens is a slip of the pen.
MAX_BATCH_SIZE: Final = 2**20


@dataclass(frozen=True)
class DTypeSpec:
    """Storage of one quantisation scheme: bits per activation and per weight element."""

    activation_bits: int
    weight_bits: int
    compute: Literal["bf16", "fp16", "fp8", "int8"]


DTYPES: Final[Mapping[str, DTypeSpec]] = {
    "bf16": DTypeSpec(16, 16, "bf16"),
    "fp16": DTypeSpec(16, 16, "fp16"),
    "fp8_w8a8": DTypeSpec(8, 8, "fp8"),
    "int8_w8a8": DTypeSpec(8, 8, "int8"),
    "int8_w8a16": DTypeSpec(16, 8, "bf16"),
    "int4_w4a16": DTypeSpec(16, 4, "bf16"),
}


@dataclass(frozen=True)
class MoEShape:
    """One MoE layer as one GPU sees it.

    Attributes:
        num_experts: E, the experts whose weights lie on this GPU, fused shared experts included.
        top_k: Experts per token, fused shared experts included.
        hidden_size: K, the model's hidden size.
        intermediate_size: N, the expert's intermediate size on this GPU (after tensor parallelism).
        dtype: One of :data:`DTYPES`.
        block_shape: (block_n, block_k) of block-wise scales, or None.
        per_channel: Scales per output channel (and per token for 8-bit activations).
        group_size: Elements of K that share a scale in a weight-only scheme, or None.
        gated: Whether W1 holds a gate and an up projection (2N rows) or one (N rows).
        shared_experts: Of the experts, how many every token visits (fused shared experts).
        ep_size: Number of expert-parallel ranks; tokens choose among ``num_experts * ep_size``
            experts, and those on other ranks are skipped here.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str = "bf16"
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    group_size: int | None = None
    gated: bool = True
    shared_experts: int = 0
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "ep_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise InvalidInputError(f"{name} is {value!r}: give a whole number of at least 1")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise InvalidInputError(f"dtype {self.dtype!r} is unknown: give one of {', '.join(DTYPES)}")
        for name in ("per_channel", "gated"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}: give true or false")
        if self.top_k > self.num_experts * self.ep_size:
            raise InvalidInputError(
                f"top_k {self.top_k} is greater than the {self.num_experts * self.ep_size} experts: "
                "a token cannot visit more experts than there are"
            )
        if (
            isinstance(self.shared_experts, bool)
            or not isinstance(self.shared_experts, int)
            or not 0 <= self.shared_experts < min(self.top_k, self.num_experts) + 1
        ):
            raise InvalidInputError(
                f"shared_experts is {self.shared_experts!r}: give 0 to {min(self.top_k, self.num_experts)}, "
                "as they count in num_experts and in top_k"
            )
        if self.block_shape is not None:
            block = tuple(self.block_shape) if isinstance(self.block_shape, list | tuple) else ()
            if len(block) != 2 or any(isinstance(b, bool) or not isinstance(b, int) or b <= 0 for b in block):
                raise InvalidInputError(f"block_shape is {self.block_shape!r}: give two sizes such as (128, 128)")
            if DTYPES[self.dtype].weight_bits != 8 or DTYPES[self.dtype].activation_bits != 8:
                raise InvalidInputError(f"block_shape is for fp8_w8a8 and int8_w8a8, not for dtype {self.dtype!r}")
            if self.per_channel:
                raise InvalidInputError("block_shape and per_channel exclude each other: give one of them")
            object.__setattr__(self, "block_shape", block)
        if self.per_channel and DTYPES[self.dtype].weight_bits != 8:
            raise InvalidInputError(f"per_channel is for 8-bit weights, not for dtype {self.dtype!r}")
        if self.group_size is not None:
            if self.dtype not in ("int4_w4a16", "int8_w8a16"):
                raise InvalidInputError(f"group_size is for int4_w4a16 and int8_w8a16, not for dtype {self.dtype!r}")
            if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size <= 0:
                raise InvalidInputError(f"group_size is {self.group_size!r}: give a whole number such as 128")
        elif self.dtype == "int4_w4a16":
            raise InvalidInputError("int4_w4a16 needs a group_size: give 32, 64 or 128, as the checkpoint says")

    def output_rows(self, role: Role) -> int:
        """Rows of the weight of one expert: 2N (N if not gated) for up, K for down."""
        if role == "up":
            return self.intermediate_size * (2 if self.gated else 1)
        return self.hidden_size

    def reduction(self, role: Role) -> int:
        """Length of the dot products: hidden size for up, intermediate size for down."""
        return self.hidden_size if role == "up" else self.intermediate_size

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping. What is at its default beyond block_shape is left out."""
        out: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _ALWAYS or value != field.default:
                out[field.name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MoEShape:
        """The inverse of :meth:`to_dict`.

        Raises:
            InvalidInputError: A key is unknown or missing, or a value is not usable.
        """
        if not isinstance(data, Mapping):
            raise InvalidInputError(f"shape is {data!r}: a mapping of its fields is expected")
        known = {field.name for field in fields(cls)}
        unknown = sorted(map(str, set(data) - known))
        if unknown:
            raise InvalidInputError(f"shape key {unknown[0]!r} is unknown: the keys are {', '.join(sorted(known))}")
        missing = [n for n in ("num_experts", "top_k", "hidden_size", "intermediate_size") if n not in data]
        if missing:
            raise InvalidInputError(f"shape key {missing[0]!r} is missing")
        return cls(**data)

    @classmethod
    def from_model(
        cls,
        path: str | Path,
        *,
        engine: str = "sglang",
        tp: int = 1,
        ep: int = 1,
        dtype: str | None = None,
        fuse_shared_experts: bool | None = None,
        **given: Any,
    ) -> MoEShape:
        """The shape of a model's MoE layers on one GPU, from its ``config.json`` alone.

        :func:`moeopt.models.shape_from_model` also says which key each number came from.

        Args:
            path: ``config.json`` or its directory.
            engine: Whose rules give E and N: ``sglang`` or ``vllm``.
            tp: Tensor-parallel size.
            ep: Expert-parallel size.
            dtype: Instead of what the config says.
            fuse_shared_experts: Whether shared experts are fused; None for what the engine does by default.
            **given: Fields of the shape that the config does not say, such as ``top_k``.

        Raises:
            InvalidInputError: The config does not say a number, or a size does not divide.
        """
        if _model_reader is None:
            raise RuntimeError("import moeopt.models before MoEShape.from_model: it reads config.json")
        return _model_reader(
            path, engine=engine, tp=tp, ep=ep, dtype=dtype, fuse_shared_experts=fuse_shared_experts, overrides=given
        )

    def slug(self) -> str:
        """A short name in words that sort well, such as ``E256-top8-K3072-N256-bf16``."""
        parts = [f"E{self.num_experts}", f"top{self.top_k}", f"K{self.hidden_size}", f"N{self.intermediate_size}"]
        parts.append(self.dtype)
        if self.block_shape:
            parts.append("b{}x{}".format(*self.block_shape))
        if self.per_channel:
            parts.append("channel")
        if self.group_size:
            parts.append(f"g{self.group_size}")
        if not self.gated:
            parts.append("ungated")
        if self.shared_experts:
            parts.append(f"shared{self.shared_experts}")
        if self.ep_size > 1:
            parts.append(f"ep{self.ep_size}")
        return "-".join(parts)

    def replace(self, **changes: Any) -> MoEShape:
        """A copy with some fields changed."""
        return MoEShape(**{**asdict(self), **changes})


# What reads a config.json: given by moeopt.models, since values know nothing of files and engines.
_model_reader: Callable[..., MoEShape] | None = None


def set_model_reader(reader: Callable[..., MoEShape]) -> None:
    """Says what :meth:`MoEShape.from_model` calls."""
    global _model_reader
    _model_reader = reader


_ALWAYS: Final = ("num_experts", "top_k", "hidden_size", "intermediate_size", "dtype", "block_shape")


def check_batch_sizes(sizes: object) -> tuple[int, ...]:
    """Batch sizes, ascending and once each.

    Raises:
        InvalidInputError: None is given, or one is not a whole number of at least 1.
    """
    if not isinstance(sizes, list | tuple) or not sizes:
        raise InvalidInputError(f"batch sizes are {sizes!r}: give at least one, such as 1,8,64")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise InvalidInputError(f"batch size {size!r} cannot be: give whole numbers of at least 1")
        if size > MAX_BATCH_SIZE:
            raise InvalidInputError(
                f"batch size {size} is over {MAX_BATCH_SIZE}: no engine runs so many tokens at once"
            )
    return tuple(sorted(set(sizes)))
