"""Experts that a quantiser left alone, or reached: lists of module names, plain or as regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from moeopt.models.config_file import ModelConfig

Reach = Literal["none", "some", "all"]

# Keys under which the quantisers list what they left alone.
_IGNORE_KEYS: Final = (
    "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude", "exclude_layers",
)  # fmt: skip
# Layers beside the model's own: multi-token prediction, in the words of the checkpoints.
_MTP: Final = re.compile(r"\bmtp\b|mtp[._]|nextn|eagle", re.IGNORECASE)
_LAYER: Final = re.compile(r"layers?\.(\d+)\.")
# A whole layer, or its block of experts.
_WHOLE: Final = re.compile(r"layers?\.(\d+)(\.(mlp|ffn|feed_forward|block_sparse_moe|mixer))?\.?\*?$")
# Where the config does not say.
_DEFAULT_LAYERS: Final = 256
# Where a regular expression may find the experts of a layer.
_BLOCKS: Final = ("model.layers.{}.mlp", "model.language_model.layers.{}.mlp", "model.layers.{}.block_sparse_moe")
_PROJECTIONS: Final = ("gate_proj", "w1")


def spared_experts(config: ModelConfig, data: Mapping[str, Any]) -> Reach:
    """Whether the lists of unquantised modules name the routed experts of no, some, or all of the model's layers.

    Those of the layers for multi-token prediction are not the model's own: a list that names only them
    leaves the model's experts quantised.

    Args:
        config: The model's config.
        data: Its ``quantization_config``.
    """
    layers = _layers(config)
    spared: set[int] = set()
    for text in (text for key in _IGNORE_KEYS for text in texts(data.get(key))):
        spared |= _named(text, layers)
    return "none" if not spared else "all" if len(spared) == layers else "some"


def reaches_experts(config: ModelConfig, targets: object) -> bool:
    """Whether the targets of a compressed-tensors group take in routed experts: a class of modules does."""
    found = texts(targets)
    return not found or any(
        _named(text, _layers(config)) if text.startswith("re:") or "." in text else True for text in found
    )


def is_expert(text: str) -> bool:
    """Whether a module name or pattern means routed experts (not shared ones, not their gate)."""
    return "experts" in text and "shared" not in text


def texts(value: object) -> Iterable[str]:
    """The strings of a list."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _layers(config: ModelConfig) -> int:
    found = config.get("num_hidden_layers")
    return found[1] if found and isinstance(found[1], int) and 0 < found[1] < 4096 else _DEFAULT_LAYERS


def _named(text: str, layers: int) -> set[int]:
    """The model's layers whose experts a module name or pattern takes in."""
    every = set(range(layers))
    if text.startswith("re:"):
        try:
            pattern = re.compile(text.removeprefix("re:"))
        except re.error:
            return set()
        matched = {i for i in every if any(pattern.match(name) for name in _expert_names(i))}
        # Other names of the block that holds the experts than those that are tried.
        return every if not matched and is_expert(text) and not _MTP.search(text) and not _digits(text) else matched
    whole = _WHOLE.search(text)
    if not (is_expert(text) or whole) or _MTP.search(text):
        return set()
    layer = whole or _LAYER.search(text)
    return every if layer is None else {int(layer[1])} & every


def _digits(text: str) -> bool:
    """Whether it means numbered layers: every digit before the word for experts counts."""
    return any(c.isdigit() for c in text.partition("expert")[0])


def _expert_names(layer: int) -> Iterable[str]:
    for block in _BLOCKS:
        for projection in _PROJECTIONS:
            yield f"{block.format(layer)}.experts.0.{projection}"
