"""Reading a model's ``config.json``: one local file, no network, no code of the model's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moeopt.errors import InvalidInputError

# The largest published ones, with long lists of unquantised layers, have a few MiB.
MAX_BYTES: Final = 64 * 1024**2
# Mistral's own format keeps the same facts in params.json.
_NAMES: Final = ("config.json", "params.json")
# Keys that hold the language model's part of a multimodal config.
_NESTED: Final = ("text_config", "thinker_config", "language_config", "llm_config")
_MAX_DEPTH: Final = 4


@dataclass(frozen=True)
class ModelConfig:
    """A parsed ``config.json``.

    Attributes:
        path: The file.
        root: Everything in it.
        part: The mapping that describes the language model: the root, or a part such as ``text_config``.
        prefix: Dotted path of that part with a dot at its end, or "".
        scopes: (prefix, mapping) from that part outwards to the root.
        quantization: ``quantization_config`` (or what stands for it), or None.
        quantization_key: Where that was found.
    """

    path: Path
    root: Mapping[str, Any]
    part: Mapping[str, Any]
    prefix: str
    scopes: tuple[tuple[str, Mapping[str, Any]], ...]
    quantization: Mapping[str, Any] | None = None
    quantization_key: str = "quantization_config"

    @property
    def architecture(self) -> str | None:
        """First of ``architectures`` (the root's, else the innermost part's), or None."""
        for _, where in reversed(self.scopes):
            names = where.get("architectures")
            if isinstance(names, list) and names and isinstance(names[0], str):
                return names[0]
        moe = self.root.get("moe")
        if isinstance(moe, dict) and "dim" in self.root and moe.get("num_shared_experts"):
            # params.json names no architecture: the engines go by the shared expert.
            return "MistralLarge3ForCausalLM"
        return None

    @property
    def model_types(self) -> tuple[str, ...]:
        """``model_type`` from the root inwards, where given."""
        found = [where.get("model_type") for _, where in reversed(self.scopes)]
        return tuple(dict.fromkeys(t for t in found if isinstance(t, str)))

    def get(self, key: str) -> tuple[str, Any] | None:
        """(full key, value) of a dotted key in the language model's part, None where it is absent or null."""
        value: Any = self.part
        for name in key.split("."):
            if not isinstance(value, Mapping) or value.get(name) is None:
                return None
            value = value[name]
        return self.prefix + key, value


def load_config(path: str | Path, expert_keys: Sequence[str]) -> ModelConfig:
    """Reads a model's config.

    Args:
        path: ``config.json`` or its directory.
        expert_keys: Dotted keys that count experts: they tell which part describes the MoE layers.

    Raises:
        InvalidInputError: No such file, too large, or not a JSON object.
    """
    file = _find(Path(path))
    root = _read(file)
    scopes = _search((("", root),), expert_keys, _MAX_DEPTH) or (("", root),)
    key, quantization = _quantization(root, scopes)
    if quantization is None and file.with_name("hf_quant_config.json").is_file():
        # Older ModelOpt checkpoints say it only there.
        key = "hf_quant_config.json: quantization"
        found = _read(file.with_name("hf_quant_config.json")).get("quantization")
        quantization = {"quant_method": "modelopt", **found} if isinstance(found, dict) else None
    return ModelConfig(file, root, scopes[0][1], scopes[0][0], scopes, quantization, key)


def _find(path: Path) -> Path:
    try:
        if path.is_file():
            return path
        if path.is_dir():
            for name in _NAMES:
                if (path / name).is_file():
                    return path / name
            raise InvalidInputError(f"{path}: holds no config.json; give the directory of a model, or the file itself")
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{str(path)!r}: cannot be read ({error}); give a model's config.json") from None
    if exists:
        raise InvalidInputError(f"{path}: not a file; give a model's config.json or its directory")
    raise InvalidInputError(
        f"{path}: no such file or directory; models are read from this machine, nothing is downloaded: "
        "give a local config.json or its directory"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise InvalidInputError(
                f"{file}: {size:,} bytes, over the {MAX_BYTES:,} that a config may have; give a model's config.json"
            )
        value = json.loads(file.read_bytes().decode("utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{file}: cannot be read ({error.strerror}); give a readable config.json") from None
    except RecursionError:
        raise InvalidInputError(f"{file}: nested too deeply; give a model's config.json") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{file}: not text in UTF-8; give a model's config.json") from None
    except ValueError as error:
        raise InvalidInputError(f"{file}: not JSON ({error}); give a model's config.json") from None
    if not isinstance(value, dict):
        raise InvalidInputError(f"{file}: holds {_kind(value)}, not a JSON object; give a model's config.json")
    return value


def short(value: object, most: int = 80) -> str:
    """A value of the file's as one printable line."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= most else text[: most - 3] + "..."


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", type(None): "null"}.get(type(value), f"a {type(value).__name__}")


_Scopes = tuple[tuple[str, Mapping[str, Any]], ...]


def _search(scopes: _Scopes, expert_keys: Sequence[str], depth: int) -> _Scopes | None:
    """The scopes of the innermost known part that counts experts, itself first; None if none does."""
    prefix, where = scopes[0]
    if depth:
        for name in _NESTED:
            part = where.get(name)
            if isinstance(part, dict):
                found = _search(((f"{prefix}{name}.", part), *scopes), expert_keys, depth - 1)
                if found:
                    return found
    probe = ModelConfig(Path(), where, where, prefix, scopes)
    return scopes if any(probe.get(key) for key in expert_keys) else None


def _quantization(root: Mapping[str, Any], scopes: _Scopes) -> tuple[str, Mapping[str, Any] | None]:
    for path, where in reversed(scopes):
        for name in ("quantization_config", "compression_config"):
            value = where.get(name)
            if isinstance(value, dict) and value:
                return path + name, value
            if value is not None and not isinstance(value, dict):
                raise InvalidInputError(f"{path}{name} is {_kind(value)}, not an object: mend the file")
    qformat = root.get("quantization")
    if isinstance(qformat, dict) and "qformat_weight" in qformat:
        return "quantization", {"quant_method": "mistral", **qformat}
    return "quantization_config", None
