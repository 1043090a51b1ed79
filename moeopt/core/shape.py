"""The shape of one MoE layer, as one GPU sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from moeopt.core.dtypes import DTYPES, DTypeSpec, Scales, dtypes_with
from moeopt.core.fields import Count, Size, check_fields, checked, from_mapping
from moeopt.errors import InvalidInputError

Role = Literal["up", "down"]
ROLES: Final[tuple[Role, Role]] = ("up", "down")

# Batch sizes that the published tuners of SGLang and vLLM walk.
DEFAULT_BATCH_SIZES: Final[tuple[int, ...]] = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip

# Upper bound that catches typos: no engine runs so many tokens at once.
MAX_BATCH_SIZE: Final = 2**20
BatchSize = Annotated[int, Meta(ge=1, le=MAX_BATCH_SIZE)]
BatchSizes = Annotated[
    tuple[BatchSize, ...],
    Meta(min_length=1, description=f"at least one batch size from 1 to {MAX_BATCH_SIZE}, such as 1,8,64"),
]


@dataclass(frozen=True)
class MoEShape:
    """One MoE layer as one GPU sees it.

    Attributes:
        num_experts: E, the experts whose weights lie on this GPU, fused shared experts included.
        top_k: Experts per token, fused shared experts included.
        hidden_size: K, the model's hidden size.
        intermediate_size: N, the expert's intermediate size on this GPU (after tensor parallelism).
        dtype: One of :data:`~moeopt.core.dtypes.DTYPES`.
        block_shape: (block_n, block_k) of block-wise scales, or None.
        per_channel: Scales per output channel (and per token for 8-bit activations).
        group_size: Elements of K that share a scale in a weight-only scheme, or None.
        gated: Whether W1 holds a gate and an up projection (2N rows) or one (N rows).
        shared_experts: Of the experts, how many every token visits (fused shared experts).
        ep_size: Number of expert-parallel ranks; tokens choose among ``num_experts * ep_size``
            experts, and those on other ranks are skipped here.
    """

    num_experts: Count
    top_k: Count
    hidden_size: Count
    intermediate_size: Count
    dtype: str = "bf16"
    block_shape: Annotated[tuple[Count, Count], Meta(description="two sizes such as (128, 128)")] | None = None
    per_channel: bool = False
    group_size: Annotated[int, Meta(ge=1, description="a whole number such as 128")] | None = None
    gated: bool = True
    shared_experts: Size = 0
    ep_size: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in DTYPES:
            raise InvalidInputError(f"dtype {self.dtype!r} is unknown: give one of {', '.join(DTYPES)}")
        experts, shared = self.num_experts * self.ep_size, min(self.top_k, self.num_experts)
        if self.top_k > experts:
            raise InvalidInputError(
                f"top_k {self.top_k} is greater than the {experts} experts: a token cannot visit more experts than "
                "there are"
            )
        if self.shared_experts > shared:
            raise InvalidInputError(
                f"shared_experts is {self.shared_experts}: give 0 to {shared}, as they count in num_experts and top_k"
            )
        if self.block_shape is not None and self.per_channel:
            raise InvalidInputError("block_shape and per_channel exclude each other: give one of them")
        given: dict[Scales, str] = {"block": "block_shape", "channel": "per_channel", "group": "group_size"}
        for scales, name in given.items():
            if getattr(self, name) and scales not in self.spec.scales:
                raise InvalidInputError(f"{name} is for {dtypes_with(scales)}, not for dtype {self.dtype!r}")
        if self.scales == "group" and self.group_size is None:
            raise InvalidInputError(f"{self.dtype} needs a group_size: give 32, 64 or 128, as the checkpoint says")

    @property
    def spec(self) -> DTypeSpec:
        """Its quantisation scheme."""
        return DTYPES[self.dtype]

    @property
    def scales(self) -> Scales:
        """Which scales it has."""
        if self.group_size:
            return "group"
        if self.block_shape:
            return "block"
        return "channel" if self.per_channel else self.spec.scales[0]

    def scale_shape(self, role: Role) -> tuple[int, ...] | None:
        """Shape of the scales of one expert's weight: () is a single scale, None is none."""
        rows, k = self.output_rows(role), self.reduction(role)
        block_n, block_k = self.block_shape or (1, self.group_size or 1)
        blocks = (-(-rows // block_n), -(-k // block_k))
        shapes: dict[Scales, tuple[int, ...] | None]
        shapes = {"none": None, "tensor": (), "channel": (rows, 1), "block": blocks, "group": blocks}
        return shapes[self.scales]

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
        return from_mapping(cls, data, "shape")

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
        InvalidInputError: None is given, or one is not a whole number from 1 to :data:`MAX_BATCH_SIZE`.
    """
    found: tuple[int, ...] = checked(sizes, BatchSizes, "batch_sizes")
    return tuple(sorted(set(found)))


def choose_batch_sizes(given: object = None, there: Sequence[int] | None = None) -> tuple[int, ...]:
    """The batch sizes that are meant.

    Args:
        given: What a user gave; None where they left it open.
        there: Those of a recording, which are all that it can time; None for a GPU, which can time any.

    Raises:
        InvalidInputError: Those given cannot be.
    """
    return check_batch_sizes(given if given is not None else there or DEFAULT_BATCH_SIZES)
