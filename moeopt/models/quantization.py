"""Quantisation of the routed experts: ``quantization_config`` in the words of :class:`~moeopt.core.shape.MoEShape`.

The quantisers' own formats: fp8 (DeepSeek's and vLLM's), compressed-tensors, AWQ, GPTQ and AutoRound,
ModelOpt, MXFP4, SGLang's w8a8 schemes. What the Triton kernel does not serve is an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moeopt.errors import InvalidInputError
from moeopt.models.config_file import ModelConfig, short

_PLAIN: Final = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "fp16": "fp16"}
# Keys under which the quantisers list what they left alone.
_IGNORE_KEYS: Final = (
    "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "exclude_layers",
)  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """How the routed experts are stored.

    Attributes:
        dtype: One of :data:`moeopt.core.dtypes.DTYPES`.
        source: The key and value that say so.
        block_shape: Block of the scales, or None.
        per_channel: Scales per output channel.
        group_size: Weights per scale, or None.
        notes: What the user should know.
    """

    dtype: str
    source: str
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    group_size: int | None = None
    notes: tuple[str, ...] = ()


def plain_scheme(config: ModelConfig) -> Scheme:
    """The scheme of unquantised weights, from ``dtype`` or ``torch_dtype``.

    Raises:
        InvalidInputError: The value is none of bf16 and fp16.
    """
    for prefix, where in config.scopes:
        for name in ("dtype", "torch_dtype"):
            value = where.get(name)
            if value is None or (isinstance(value, str) and value in ("", "auto")):
                continue
            key = prefix + name
            text = value.removeprefix("torch.") if isinstance(value, str) else None
            if text not in _PLAIN:
                raise InvalidInputError(
                    f"{config.path}: {key} is {short(value)}: give --dtype bf16 or fp16, as the engine will load it"
                )
            return Scheme(_PLAIN[text], f"{key} = {text}")
    return Scheme("bf16", "assumed, no dtype or torch_dtype key", notes=("bf16 is assumed: give --dtype to change it",))


def read_scheme(config: ModelConfig, group_size: int | None = None) -> Scheme:
    """The scheme of the routed experts.

    Args:
        config: The model's config.
        group_size: Given by hand: stands in where the config's is null or -1.

    Raises:
        InvalidInputError: The config is not understood, or the Triton kernel does not serve its format.
    """
    expert_dtype = config.part.get("expert_dtype") or (config.quantization or {}).get("expert_dtype")
    if expert_dtype is not None and expert_dtype not in ("fp8", "bf16"):
        raise _unserved(config, f"expert_dtype = {short(expert_dtype)}")
    quantization = config.quantization
    if quantization is None:
        return plain_scheme(config)
    reader = _Reader(config, quantization, config.quantization_key, group_size)
    spared = _spared_experts(quantization)
    if spared == "all":
        scheme = plain_scheme(config)
        return Scheme(scheme.dtype, f"{scheme.source} ({reader.key} leaves the experts unquantised)")
    scheme = reader.scheme()
    if spared == "some":
        note = f"{reader.key} leaves the experts of some layers unquantised: this shape is that of the others"
        return Scheme(
            scheme.dtype,
            scheme.source,
            scheme.block_shape,
            scheme.per_channel,
            scheme.group_size,
            (*scheme.notes, note),
        )
    return scheme


@dataclass(frozen=True)
class _Reader:
    config: ModelConfig
    data: Mapping[str, Any]
    key: str
    group_size: int | None

    def scheme(self) -> Scheme:
        method = self.data.get("quant_method")
        if method is None and "config_groups" in self.data:
            method = "compressed-tensors"
        if not isinstance(method, str):
            raise self.bad("quant_method", method, "a name is expected")
        name = method.lower().replace("_", "-")
        if name in ("fp8", "mistral"):
            return self._mistral() if name == "mistral" else self._blocks("fp8_w8a8")
        if name == "blockwise-int8":
            return self._blocks("int8_w8a8")
        if name == "compressed-tensors":
            return self._compressed_tensors()
        if name in ("awq", "gptq", "auto-round", "moe-wna16", "awq-marlin", "gptq-marlin"):
            return self._weight_only()
        if name in ("w8a8-int8", "w8a8-fp8"):
            return Scheme(
                "int8_w8a8" if name == "w8a8-int8" else "fp8_w8a8", self.at("quant_method", method), per_channel=True
            )
        if name == "experts-int8":
            return Scheme("int8_w8a16", self.at("quant_method", method), per_channel=True)
        if name.startswith("modelopt"):
            return self._modelopt()
        if "fp4" in name or "nf4" in name or name in ("bitsandbytes", "mxfp8", "w4afp8", "gguf"):
            raise _unserved(self.config, self.at("quant_method", method))
        raise self.bad("quant_method", method, "its layout is not known here")

    def at(self, key: str, value: Any) -> str:
        return f"{self.key}.{key} = {short(value)}"

    def bad(
        self, key: str, value: Any, why: str, option: str = "--dtype (and --block-shape, --per-channel)"
    ) -> InvalidInputError:
        return InvalidInputError(f"{self.config.path}: {self.at(key, value)}: {why}; give {option} by hand")

    def _pair(self, key: str, value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            value = [int(v) if v.isdecimal() and len(v) < 10 else v for v in value.lower().split("x")]
        if not isinstance(value, list) or len(value) != 2 or not all(_positive(v) for v in value):
            raise self.bad(key, value, "two sizes such as [128, 128] are expected", "--dtype and --block-shape")
        return value[0], value[1]

    def _blocks(self, dtype: str) -> Scheme:
        value = self.data.get("weight_block_size")
        if value is None:
            return Scheme(dtype, f"{self.at('quant_method', self.data.get('quant_method'))}, no weight_block_size")
        pair = self._pair("weight_block_size", value)
        if min(pair) < 16:
            raise _unserved(self.config, self.at("weight_block_size", value))
        return Scheme(dtype, self.at("weight_block_size", value), block_shape=pair)

    def _mistral(self) -> Scheme:
        weight = self.data.get("qformat_weight")
        if weight != "fp8_e4m3":
            raise self.bad("qformat_weight", weight, "only fp8_e4m3 is known here")
        return Scheme("fp8_w8a8", self.at("qformat_weight", weight))

    def _weight_only(self) -> Scheme:
        bits_key, bits = self._first("bits", "w_bit")
        if bits not in (4, 8):
            raise self.bad(bits_key, bits, "4 or 8 is expected", "--dtype and --group-size")
        size_key, size = self._first("group_size", "q_group_size")
        return self._grouped(bits, size_key, size, self.at(bits_key, bits))

    def _grouped(self, bits: int, size_key: str, size: Any, source: str) -> Scheme:
        dtype = "int4_w4a16" if bits == 4 else "int8_w8a16"
        note = "weight-only experts go to Marlin by default: the Triton files are read with moe_wna16 only"
        if size is None or size == -1:
            if bits == 8:
                return Scheme(dtype, source, per_channel=True, notes=(note,))
            if self.group_size is None:
                raise self.bad(
                    size_key, size, "one scale per row has no group size that the kernel takes", "--group-size"
                )
            size = self.group_size
        if not _positive(size):
            raise self.bad(size_key, size, "a size such as 128 is expected", "--group-size")
        return Scheme(dtype, f"{source}, {self.at(size_key, size)}", group_size=size, notes=(note,))

    def _first(self, *keys: str) -> tuple[str, Any]:
        return next(((k, self.data[k]) for k in keys if self.data.get(k) is not None), (keys[0], None))

    def _modelopt(self) -> Scheme:
        inner = self.data.get("quantization")
        data = {**(inner if isinstance(inner, dict) else {}), **self.data}
        algorithm = data.get("quant_algo")
        text = algorithm.upper() if isinstance(algorithm, str) else None
        if text == "FP8":
            return Scheme("fp8_w8a8", self.at("quant_algo", algorithm))
        if text is not None and "FP4" in text:
            raise _unserved(self.config, self.at("quant_algo", algorithm))
        if text is None and isinstance(self.data.get("config_groups"), dict):
            return self._compressed_tensors()
        raise self.bad("quant_algo", algorithm, "FP8 or NVFP4 is expected")

    def _compressed_tensors(self) -> Scheme:
        groups = self.data.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise self.bad("config_groups", groups, "one group of weights at least is expected")
        usable = {name: g for name, g in groups.items() if isinstance(g, dict) and isinstance(g.get("weights"), dict)}
        named = {n: g for n, g in usable.items() if any(_is_expert(t) for t in _texts(g.get("targets")))}
        schemes = [self._group(name, group) for name, group in (named or usable).items()]
        if not schemes:
            raise self.bad("config_groups", sorted(map(str, groups)), "none has weights")
        first = schemes[0]
        alike = (first.dtype, first.block_shape, first.per_channel, first.group_size)
        if any((s.dtype, s.block_shape, s.per_channel, s.group_size) != alike for s in schemes):
            raise self.bad("config_groups", sorted(map(str, groups)), "the groups differ and none names the experts")
        return first

    def _group(self, name: str, group: Mapping[str, Any]) -> Scheme:
        weights = group["weights"]
        key = f"config_groups.{short(name)}.weights"
        bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
        source = f"{self.key}.{key} = {short(bits)}-bit {short(kind)} per {short(strategy)}"
        activations = group.get("input_activations")
        act_bits = activations.get("num_bits") if isinstance(activations, dict) else None
        if bits == 4 and kind == "float":
            raise _unserved(self.config, source)
        if bits in (4, 8) and kind == "int" and act_bits is None:
            return self._grouped(bits, f"{key}.group_size", weights.get("group_size"), source)
        if bits == 8 and act_bits == 8 and kind in ("float", "int"):
            dtype = "fp8_w8a8" if kind == "float" else "int8_w8a8"
            if strategy == "block":
                return Scheme(
                    dtype, source, block_shape=self._pair(f"{key}.block_structure", weights.get("block_structure"))
                )
            if strategy in ("channel", "tensor"):
                return Scheme(dtype, source, per_channel=strategy == "channel")
        raise self.bad(
            key, {"num_bits": bits, "type": kind, "strategy": strategy, "activation bits": act_bits}, "not known here"
        )


def _unserved(config: ModelConfig, source: str) -> InvalidInputError:
    return InvalidInputError(
        f"{config.path}: {source}: the Triton fused MoE kernel does not serve this format, so no config file of it is "
        "read for this checkpoint; to tune the shape for another checkpoint of the model give --dtype bf16 or "
        "--dtype fp8_w8a8"
    )


def _spared_experts(data: Mapping[str, Any]) -> str:
    """Whether the lists of unquantised modules name routed experts: ``none``, ``some`` layers', or ``all``."""
    found = "none"
    for key in _IGNORE_KEYS:
        for text in _texts(data.get(key)):
            if _is_expert(text):
                if not any(c.isdigit() for c in text.partition("expert")[0]):
                    return "all"
                found = "some"
    return found


def _is_expert(text: str) -> bool:
    """Whether a module name or pattern means routed experts (not shared ones, not their gate)."""
    return "experts" in text and "shared" not in text


def _texts(value: object) -> Iterable[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
