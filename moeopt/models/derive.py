"""The shape of a model's MoE layers on one GPU, with the key that each number came from."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeopt import engines
from moeopt.core.dtypes import DTYPES
from moeopt.core.shape import MoEShape
from moeopt.engines import EngineSpec
from moeopt.engines.serving import Checkpoint
from moeopt.engines.spec import sizes_that_divide
from moeopt.errors import InvalidInputError
from moeopt.models.config_file import ModelConfig, load_config, short
from moeopt.models.families import EXPERT_KEYS, GENERIC, find_family
from moeopt.models.lookup import OPTIONS, DerivedValue, Lookup
from moeopt.models.quantization import Scheme, plain_scheme, read_scheme


@dataclass(frozen=True)
class Derivation:
    """Where a shape came from.

    Attributes:
        path: The file.
        model: The family and the architecture.
        engine: Whose rules were followed.
        tp: Tensor-parallel size.
        ep: Expert-parallel size.
        values: One per number of the shape.
        file: E and N as the engine writes them into the name of the config file.
        checkpoint: What the engine picks its kernel by.
        notes: What the user should know.
    """

    path: Path
    model: str
    engine: str
    tp: int
    ep: int
    values: tuple[DerivedValue, ...]
    file: str
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The derivation as text, one line per fact."""
        width = max(len(f"{v.name} {v.value}") for v in self.values)
        return (
            f"{self.path}: {self.model}, for {self.engine} with tp {self.tp}, ep {self.ep}",
            *(f"  {f'{v.name} {v.value}':<{width}}  {v.source}" for v in self.values),
            f"  config file: {self.file}",
            *(f"  note: {note}" for note in self.notes),
        )


def shape_from_model(
    path: str | Path,
    *,
    engine: str = engines.DEFAULT,
    tp: int = 1,
    ep: int = 1,
    dtype: str | None = None,
    fuse_shared_experts: bool | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[MoEShape, Derivation]:
    """The shape of a model's MoE layers on one GPU, from ``config.json`` alone.

    Args:
        path: ``config.json`` or its directory.
        engine: Whose rules give E and N: ``sglang`` (E from ep, N from tp / ep) or ``vllm`` (with expert
            parallelism, which spans the tensor-parallel ranks, E / ep and the full N).
        tp: Tensor-parallel size.
        ep: Expert-parallel size: a divisor of tp for SGLang, a multiple of tp for vLLM.
        dtype: Instead of what the config says, one of :data:`moeopt.core.dtypes.DTYPES`.
        fuse_shared_experts: Whether shared experts are appended to the routed ones; None for what the engine
            does by default.
        overrides: Fields of the shape, as one GPU sees them, that are given by hand.

    Returns:
        The shape, and the derivation of its numbers.

    Raises:
        InvalidInputError: The file cannot be used, a key is missing or ambiguous (the message names the option
            that stands in for it), a size does not divide, or the engine cannot load such experts.
    """
    overrides = dict(overrides or {})
    spec = engines.get(engine)
    shards = _shards(spec, tp, ep)
    _check_arguments(spec, dtype, fuse_shared_experts, overrides)
    config = load_config(path, EXPERT_KEYS)
    family = find_family(config.architecture, config.model_types)
    name = short(config.architecture or " ".join(config.model_types) or "no architectures key")
    look = Lookup(config, family or GENERIC, overrides)
    scheme, scheme_notes = _scheme(config, dtype, overrides.get("group_size"))
    shape = _Rules(look, spec, shards, ep, fuse_shared_experts).shape(scheme)
    checkpoint = Checkpoint(
        shape,
        scheme.method,
        scheme.symmetric,
        scheme.act_order,
        scheme.static,
        config.architecture,
        config.model_types,
    )
    refusal = spec.serving.refusal(checkpoint)
    if refusal is not None:
        raise InvalidInputError(
            f"{config.path}: {scheme.source}: {spec.title} cannot load it: {refusal}; give another --engine, or "
            "--dtype to tune the shape for another checkpoint"
        )
    if family is None:
        look.notes.append(
            f"{name} is not in the table of families: keys were found by probing, and a shared expert, if there is "
            "one, is taken as not fused; check the numbers"
        )
    file = spec.names.of(shape, "GPU")
    return shape, Derivation(
        path=config.path,
        model=f"{look.family.name} ({name})",
        engine=engine,
        tp=tp,
        ep=ep,
        values=tuple(look.values),
        file=f"E={file.num_experts},N={file.intermediate_size}",
        checkpoint=checkpoint,
        notes=(*scheme_notes, *look.notes),
    )


def _shards(spec: EngineSpec, tp: int, ep: int) -> int:
    """How many parts N is cut into."""
    for option, size in (("--tp", tp), ("--ep", ep)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidInputError(f"{option} is {size!r}: give a whole number of at least 1")
    return spec.shards(tp, ep)


def _check_arguments(spec: EngineSpec, dtype: str | None, fuse: bool | None, overrides: Mapping[str, Any]) -> None:
    if fuse and not spec.fuses_shared_experts:
        raise InvalidInputError(f"--fuse-shared: {spec.title} fuses no shared expert on CUDA GPUs; omit it")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidInputError(f"--dtype {dtype!r} is unknown: give one of {', '.join(DTYPES)}")
    unknown = sorted(set(overrides) - set(OPTIONS))
    if unknown:
        raise InvalidInputError(f"override {unknown[0]!r} is unknown: the overrides are {', '.join(OPTIONS)}")


def _scheme(config: ModelConfig, dtype: str | None, group_size: int | None) -> tuple[Scheme, tuple[str, ...]]:
    """The scheme of the experts' weights and the notes on it: the config's, or what was given by hand."""
    if dtype is None:
        scheme = read_scheme(config, group_size)
        return scheme, scheme.notes
    source = "given by hand"
    if config.quantization is None:
        with contextlib.suppress(InvalidInputError):
            source += f", where {plain_scheme(config).source}"
        return Scheme(dtype, source), ()
    try:
        scheme = read_scheme(config, group_size)
    except InvalidInputError:
        return Scheme(dtype, source), (f"{config.quantization_key} is not used, as the dtype is given by hand",)
    if scheme.dtype == dtype:
        return scheme, scheme.notes
    return Scheme(dtype, f"{source}, where {scheme.source}"), ()


@dataclass
class _Rules:
    """The engine's rules, applied to one config."""

    look: Lookup
    spec: EngineSpec
    shards: int
    ep: int
    fuse: bool | None

    def shape(self, scheme: Scheme) -> MoEShape:
        """The shape, its numbers noted one by one."""
        look = self.look
        # DeepSeek's is not fused with the int4 of compressed-tensors; AWQ and GPTQ are loaded by moe_wna16, and it is.
        int4 = DTYPES[scheme.dtype].weight == "int4" and scheme.method not in ("awq", "gptq", "moe-wna16")
        experts, top_k, shared = self.experts(int4=int4)
        hidden = look.number("hidden_size", look.family.hidden)
        look.record("dtype", scheme.dtype, scheme.source)
        block_shape, per_channel = self.scales(scheme)
        n, block_shape = self.intermediate(block_shape, hidden)
        return MoEShape(
            num_experts=experts,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=n,
            dtype=scheme.dtype,
            block_shape=block_shape,
            per_channel=per_channel,
            group_size=self.group_size(scheme.group_size, n, hidden),
            gated=look.family.gated,
            shared_experts=shared,
            ep_size=self.ep,
        )

    def experts(self, *, int4: bool) -> tuple[int, int, int]:
        """E and top_k on this GPU, and how many of them are fused shared experts."""
        look, path = self.look, self.look.config.path
        routed = self._routed()
        shared = self._fused(routed[1] if routed else 0, int4)
        plus = f", + {shared} fused shared" if shared else ""
        experts = look.given("num_experts")
        if experts is None:
            assert routed is not None
            key, total = routed
            if total % self.ep:
                raise InvalidInputError(
                    f"{path}: {key} = {total} experts do not divide over --ep {self.ep} (sizes that do: "
                    f"{sizes_that_divide(total)}); give --experts for the rank you tune"
                )
            experts = total // self.ep + shared
            over = f", / {self.ep} (ep)" if self.ep > 1 else ""
            look.record("num_experts", experts, f"{key} = {total}{over}{plus}")
        top_k = look.given("top_k")
        if top_k is None:
            key, chosen = look.find("top_k", look.family.top_k)
            top_k = chosen + shared
            look.record("top_k", top_k, f"{key} = {chosen}{plus}")
        return experts, top_k, shared

    def _routed(self) -> tuple[str, int] | None:
        look, path = self.look, self.look.config.path
        by_hand = "num_experts" in look.overrides
        found = look.first_present(look.family.experts, None if by_hand else "num_experts")
        if found is None:
            if by_hand:
                return None
            raise InvalidInputError(
                f"{path}: no key counts experts (looked for {', '.join(look.family.experts)}): a dense model has no "
                "MoE layer to tune; for an MoE model give --experts, --top-k, --hidden and --intermediate"
            )
        key, value = look.check("num_experts", *found)
        if value < 2:
            raise InvalidInputError(
                f"{path}: {key} = {value}: a dense model has no MoE layer to tune; for an MoE model give --experts"
            )
        return key, value

    def _fused(self, routed: int, int4: bool) -> int:
        """How many shared experts the engine appends; says why or why not, where there are any."""
        look = self.look
        key, count = look.shared_experts()
        if not count:
            if self.fuse:
                raise InvalidInputError(f"--fuse-shared: {look.config.path} names no shared expert; omit it")
            return 0
        fused, why = self._fusion(count, routed, int4)
        look.record("shared_experts", count if fused else 0, f"{key}: {why}")
        return count if fused else 0

    def _fusion(self, count: int, routed: int, int4: bool) -> tuple[bool, str]:
        look, fusion = self.look, self.look.family.fusion
        if self.fuse is not None:
            return self.fuse, "fused, as asked for" if self.fuse else "not fused, as asked for"
        title = self.spec.title
        if not self.spec.fuses_shared_experts:
            return False, f"{title} runs it apart on CUDA"
        if fusion is None:
            where = "is taken as run apart" if look.family is GENERIC else f"runs apart in {title} for this family"
            return False, f"it {where}"
        size = look.first_present((look.family.shared_size,)) if look.family.shared_size else None
        expert = look.first_present(look.family.intermediate)
        obstacle = fusion.obstacle(
            architecture=look.config.architecture,
            routed=routed,
            shared=count,
            same_size=size is not None and expert is not None and size[1] == expert[1],
            ep=self.ep,
            int4=int4,
        )
        if obstacle:
            return False, f"{obstacle} in {title} (--fuse-shared where the server enforces it)"
        return True, f"{title} fuses it with the routed ones (--no-fuse-shared where the server disables it)"

    def scales(self, scheme: Scheme) -> tuple[tuple[int, int] | None, bool]:
        """block_shape and per_channel: what is given by hand replaces both."""
        given = self.look.overrides
        block_shape, per_channel = given.get("block_shape"), given.get("per_channel")
        if block_shape is None and per_channel is None:
            block_shape, per_channel, source = scheme.block_shape, scheme.per_channel, "of that key"
        else:
            source = "given by hand"
        if block_shape == ():
            block_shape = None
        elif block_shape is not None:
            if (
                not isinstance(block_shape, list | tuple)
                or len(block_shape) != 2
                or not all(map(_is_size, block_shape))
            ):
                raise InvalidInputError(f"--block-shape is {block_shape!r}: give two sizes such as 128,128")
            block_shape = (block_shape[0], block_shape[1])
            self.look.record("block_shape", list(block_shape), source)
        if per_channel:
            self.look.record("per_channel", True, source)
        return block_shape, bool(per_channel)

    def intermediate(self, block_shape: tuple[int, int] | None, hidden: int) -> tuple[int, tuple[int, int] | None]:
        """N on this GPU, and the block of the scales there."""
        look = self.look
        given = look.given("intermediate_size")
        if given is not None:
            return given, block_shape
        key, size = look.find("intermediate_size", look.family.intermediate)
        shards = self.shards
        if block_shape is not None and size % shards == 0 and not _divides(size, shards, block_shape):
            refined = self.spec.serving.refined_block(block_shape, size // shards, hidden)
            if refined is not None:
                said = f"{list(block_shape)}, which {self.spec.title} refines to divide N"
                look.record("block_shape", list(refined), said)
                block_shape = refined
        if not _divides(size, shards, block_shape):
            fits = [s for s in range(1, 257) if _divides(size, s, block_shape)]
            unit = f" into multiples of block_shape {list(block_shape)}" if block_shape else ""
            advice = f"sizes that do: {', '.join(map(str, fits))}" if fits else "no size does"
            of = "--tp / --ep" if self.ep > 1 else "--tp"
            raise InvalidInputError(
                f"{look.config.path}: {key} = {size} does not divide by {of} = {shards}{unit} ({advice}); "
                f"{self.spec.title} cannot load it either"
            )
        n = size // shards
        over = f", / {shards} ({'tp / ep' if self.ep > 1 else 'tp'})" if shards > 1 else ""
        look.record("intermediate_size", n, f"{key} = {size}{over}")
        return n, block_shape

    def group_size(self, size: int | None, n: int, hidden: int) -> int | None:
        """Weights per scale: both engines' moe_wna16 halves the checkpoint's until it divides N and K, down to 32."""
        given = self.look.given("group_size")
        if given is not None or size is None:
            return given
        fits = size
        while fits >= 64 and (n % fits or hidden % fits):
            fits //= 2
        if n % fits or hidden % fits:
            raise InvalidInputError(
                f"{self.look.config.path}: group_size {size} does not divide N = {n} and K = {hidden}, nor does it "
                "halved, down to 32; give another --tp, or --group-size"
            )
        halved = "of that key" if fits == size else f"{size}, which the engine halves until it divides N and K"
        self.look.record("group_size", fits, halved)
        return fits


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _divides(size: int, shards: int, block: tuple[int, int] | None) -> bool:
    """Whether an expert of this size can be cut, with whole blocks of scales in each shard as both engines ask."""
    if size % shards:
        return False
    n = size // shards
    return block is None or (n % block[0] == 0 and (shards == 1 or n % block[1] == 0))
