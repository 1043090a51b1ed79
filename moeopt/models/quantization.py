"""Quantisation of the routed experts: ``quantization_config`` in the words of :class:`~moeopt.core.shape.MoEShape`.

The quantisers' own formats: fp8 (DeepSeek's and vLLM's), compressed-tensors, AWQ, GPTQ and AutoRound,
ModelOpt, MXFP4, SGLang's w8a8 schemes. What the Triton kernel does not serve is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from moeopt.errors import InvalidInputError
from moeopt.models.config_file import ModelConfig, short
from moeopt.models.spared import is_expert, reaches_experts, spared_experts, texts

_PLAIN: Final = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "fp16": "fp16"}
# Block of ModelOpt's FP8_PB_WO, which keeps it as group_size, where it does not say.
_MODELOPT_BLOCK: Final = 128
_FP8: Final = "--dtype fp8_w8a8 and --block-shape"


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
        method: The quantiser, as engines call it with hyphens (``fp8``, ``compressed-tensors``, ``awq``, ``gptq``,
            ``auto-round``, ``modelopt``, ...), or None for unquantised weights.
        symmetric: Whether weights have no zero points.
        act_order: Whether weights are stored in the order of activations.
        static: Whether activations have one scale that is in the checkpoint.
    """

    dtype: str
    source: str
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    group_size: int | None = None
    notes: tuple[str, ...] = ()
    method: str | None = None
    symmetric: bool = True
    act_order: bool = False
    static: bool = False


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
    spared = spared_experts(config, quantization)
    scheme = reader.scheme() if spared != "all" else None
    if scheme is None:
        scheme = plain_scheme(config)
        return replace(scheme, source=f"{scheme.source} ({reader.key} leaves the experts unquantised)")
    if spared == "some":
        note = f"{reader.key} leaves the experts of some layers unquantised: this shape is that of the others"
        return replace(scheme, notes=(*scheme.notes, note))
    return scheme


@dataclass(frozen=True)
class _Reader:
    config: ModelConfig
    data: Mapping[str, Any]
    key: str
    group_size: int | None

    def scheme(self) -> Scheme | None:
        """The scheme of the experts; None where the quantiser did not reach them."""
        method = self.data.get("quant_method")
        if method is None:
            # ModelOpt's own exports have the algorithm beside groups in the words of compressed-tensors.
            method = "modelopt" if "quant_algo" in self.data else None
        if method is None and "config_groups" in self.data:
            method = "compressed-tensors"
        if not isinstance(method, str):
            raise self.bad("quant_method", method, "a name is expected")
        name = method.lower().replace("_", "-")
        readers: dict[str, Callable[[], Scheme | None]] = {
            "fp8": lambda: self._blocks("fp8_w8a8"),
            "mistral": self._mistral,
            "blockwise-int8": lambda: self._blocks("int8_w8a8"),
            "compressed-tensors": self._compressed_tensors,
            "auto-round": self._auto_round,
            **dict.fromkeys(("awq", "gptq", "moe-wna16", "awq-marlin", "gptq-marlin"), self._weight_only),
            "w8a8-int8": lambda: self._per_channel("int8_w8a8", method),
            "w8a8-fp8": lambda: self._per_channel("fp8_w8a8", method),
            "experts-int8": lambda: self._per_channel("int8_w8a16", method),
        }
        if name in readers:
            scheme = readers[name]()
        elif name.startswith("modelopt"):
            scheme, name = self._modelopt(), "modelopt"
        elif "fp4" in name or "nf4" in name or name in ("bitsandbytes", "mxfp8", "w4afp8", "gguf"):
            raise _unserved(self.config, self.at("quant_method", method))
        else:
            raise self.bad("quant_method", method, "its layout is not known here")
        if scheme is None:
            return None
        name = {"mistral": "fp8", "awq-marlin": "awq", "gptq-marlin": "gptq"}.get(name, name)
        return replace(scheme, method=scheme.method or name)

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

    def _per_channel(self, dtype: str, method: str) -> Scheme:
        return Scheme(dtype, self.at("quant_method", method), per_channel=True)

    def _blocks(self, dtype: str) -> Scheme:
        if self.data.get("routed_experts_quant_method") not in (None, "fp8"):
            key = "routed_experts_quant_method"
            raise _unserved(self.config, self.at(key, self.data[key]))
        activations = self.data.get("activation_scheme")
        if activations not in (None, "static", "dynamic"):
            raise self.bad("activation_scheme", activations, "static or dynamic is expected")
        value = self.data.get("weight_block_size")
        if value is None:
            source = f"{self.at('quant_method', self.data.get('quant_method'))}, no weight_block_size"
            return Scheme(dtype, source, static=activations == "static")
        pair = self._pair("weight_block_size", value)
        if min(pair) < 16:
            raise _unserved(self.config, self.at("weight_block_size", value))
        return Scheme(dtype, self.at("weight_block_size", value), block_shape=pair)

    def _mistral(self) -> Scheme:
        weight, activations = self.data.get("qformat_weight"), self.data.get("qscheme_act")
        if weight != "fp8_e4m3":
            raise self.bad("qformat_weight", weight, "only fp8_e4m3 is known here")
        if activations not in (None, "TENSOR", "NO_SCALES"):
            raise self.bad("qscheme_act", activations, "TENSOR or NO_SCALES is expected")
        return Scheme("fp8_w8a8", self.at("qformat_weight", weight), static=activations != "NO_SCALES")

    def _auto_round(self) -> Scheme:
        kind = self.data.get("data_type", "int")
        text = kind.lower() if isinstance(kind, str) else ""
        if "mx_fp" in text or "nv_fp" in text:
            raise _unserved(self.config, self.at("data_type", kind))
        if text in ("fp", "fp8"):
            if self.data.get("bits") != 8:
                raise self.bad("bits", self.data.get("bits"), "8 is expected for data_type fp")
            value = self.data.get("group_size")
            if not isinstance(value, list):
                raise self.bad("group_size", value, "vLLM, which alone loads AutoRound's fp8, takes blocks only", _FP8)
            return Scheme("fp8_w8a8", self.at("group_size", value), block_shape=self._pair("group_size", value))
        if text != "int":
            raise self.bad("data_type", kind, "int or fp is expected")
        return self._weight_only()

    def _weight_only(self) -> Scheme:
        bits_key, bits = self._first("bits", "w_bit")
        if bits not in (4, 8):
            raise self.bad(bits_key, bits, "4 or 8 is expected", "--dtype and --group-size")
        size_key, size = self._first("group_size", "q_group_size")
        symmetric = self.data.get("sym", not self.data.get("zero_point", False))
        scheme = self._grouped(bits, size_key, size, self.at(bits_key, bits))
        return replace(scheme, symmetric=bool(symmetric), act_order=bool(self.data.get("desc_act", False)))

    def _grouped(self, bits: int, size_key: str, size: Any, source: str) -> Scheme:
        dtype = "int4_w4a16" if bits == 4 else "int8_w8a16"
        if size is None or size == -1:
            if self.group_size is None:
                raise InvalidInputError(
                    f"{self.config.path}: {self.at(size_key, size)}: one scale per row: both engines run such experts "
                    "in Marlin, which reads no config file, as their Triton kernels take groups only; to tune a "
                    "checkpoint with groups give --group-size by hand"
                )
            size = self.group_size
        if not _positive(size):
            raise self.bad(size_key, size, "a size such as 128 is expected", "--group-size")
        return Scheme(dtype, f"{source}, {self.at(size_key, size)}", group_size=size)

    def _first(self, *keys: str) -> tuple[str, Any]:
        return next(((k, self.data[k]) for k in keys if self.data.get(k) is not None), (keys[0], None))

    def _modelopt(self) -> Scheme | None:
        inner = self.data.get("quantization")
        data = {**(inner if isinstance(inner, dict) else {}), **self.data}
        algorithm = data.get("quant_algo")
        if algorithm == "MIXED_PRECISION":
            return self._mixed(data.get("quantized_layers"))
        if algorithm is None and isinstance(self.data.get("config_groups"), dict):
            return self._compressed_tensors()
        return self._algorithm(self.at("quant_algo", algorithm), algorithm, data.get("group_size"))

    def _mixed(self, layers: object) -> Scheme | None:
        """ModelOpt's per-layer algorithms: that of the experts, all of which must agree."""
        if not isinstance(layers, dict) or not layers:
            raise self.bad("quantized_layers", layers, "an algorithm for each module is expected")
        found = {
            (value.get("quant_algo"), value.get("group_size"))
            for name, value in layers.items()
            if isinstance(value, dict) and is_expert(str(name))
        }
        if not found:
            return None
        if len(found) > 1:
            names = ", ".join(sorted({short(algorithm) for algorithm, _ in found}))
            raise self.bad("quantized_layers", names, "the experts' algorithms differ between layers")
        ((algorithm, size),) = found
        return self._algorithm(f"{self.key}.quantized_layers: experts {short(algorithm)}", algorithm, size)

    def _algorithm(self, source: str, algorithm: object, group_size: object) -> Scheme:
        text = algorithm.upper() if isinstance(algorithm, str) else ""
        if text == "FP8":
            return Scheme("fp8_w8a8", source, static=True)
        if text == "FP8_PER_CHANNEL_PER_TOKEN":
            return Scheme("fp8_w8a8", source, per_channel=True)
        if text in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
            size = _MODELOPT_BLOCK if group_size is None else group_size
            return Scheme("fp8_w8a8", source, block_shape=self._pair("group_size", [size, size]))
        if "FP4" in text or text == "MXFP8" or text.startswith("W4A8"):
            raise _unserved(self.config, source)
        raise self.bad("quant_algo", algorithm, "FP8, FP8_PB_WO, NVFP4 or MIXED_PRECISION is expected")

    def _compressed_tensors(self) -> Scheme | None:
        groups = self.data.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise self.bad("config_groups", groups, "one group of weights at least is expected")
        usable = {name: g for name, g in groups.items() if isinstance(g, dict) and isinstance(g.get("weights"), dict)}
        if not usable:
            raise self.bad("config_groups", sorted(map(str, groups)), "none has weights")
        usable = {name: g for name, g in usable.items() if reaches_experts(self.config, g.get("targets"))}
        named = {n: g for n, g in usable.items() if any(is_expert(t) for t in texts(g.get("targets")))}
        schemes = [self._group(name, group) for name, group in (named or usable).items()]
        if not schemes:
            return None
        first = schemes[0]
        if any(replace(s, source="") != replace(first, source="") for s in schemes):
            raise self.bad("config_groups", sorted(map(str, groups)), "the groups differ and none names the experts")
        return first

    def _group(self, name: str, group: Mapping[str, Any]) -> Scheme:
        weights = group["weights"]
        key = f"config_groups.{short(name)}.weights"
        bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
        source = f"{self.key}.{key} = {short(bits)}-bit {short(kind)} per {short(strategy)}"
        activations = group.get("input_activations")
        act_bits = activations.get("num_bits") if isinstance(activations, dict) else None
        if bits == 4 and (kind == "float" or act_bits is not None):
            raise _unserved(self.config, source)
        if bits in (4, 8) and kind == "int" and act_bits is None:
            scheme = self._grouped(bits, f"{key}.group_size", weights.get("group_size"), source)
            order = weights.get("actorder") not in (None, False, "static", "weight")
            return replace(scheme, symmetric=bool(weights.get("symmetric", True)), act_order=order)
        if bits == 8 and act_bits == 8 and kind in ("float", "int"):
            dtype = "fp8_w8a8" if kind == "float" else "int8_w8a8"
            if strategy == "block":
                return Scheme(
                    dtype, source, block_shape=self._pair(f"{key}.block_structure", weights.get("block_structure"))
                )
            # ModelOpt leaves the strategy out where there is one scale for the tensor.
            if strategy in ("channel", "tensor", None):
                static = isinstance(activations, dict) and not activations.get("dynamic", False)
                return Scheme(dtype, source, per_channel=strategy == "channel", static=static)
        raise self.bad(
            key, {"num_bits": bits, "type": kind, "strategy": strategy, "activation bits": act_bits}, "not known here"
        )


def _unserved(config: ModelConfig, source: str) -> InvalidInputError:
    return InvalidInputError(
        f"{config.path}: {source}: the Triton fused MoE kernel does not serve this format, so no config file of it is "
        "read for this checkpoint; to tune the shape for another checkpoint of the model give --dtype bf16 or "
        "--dtype fp8_w8a8"
    )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
