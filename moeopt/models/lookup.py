"""Finding the numbers of a shape in a config, and keeping a record of where each came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moeopt.errors import InvalidInputError
from moeopt.models.config_file import ModelConfig, short
from moeopt.models.families import GENERIC, Family

# Field of MoEShape -> the option that gives it by hand.
OPTIONS: Final[Mapping[str, str]] = {
    "num_experts": "--experts",
    "top_k": "--top-k",
    "hidden_size": "--hidden",
    "intermediate_size": "--intermediate",
    "block_shape": "--block-shape",
    "per_channel": "--per-channel",
    "group_size": "--group-size",
}
_MOST: Final = 2**31 - 1
# Keys that say that a model has dense layers too, so that intermediate_size may be theirs.
_DENSE_SIGNS: Final = (
    "first_k_dense_replace", "mlp_only_layers", "num_dense_layers", "moe_layer_freq", "decoder_sparse_step",
    "shared_expert_intermediate_size",
)  # fmt: skip


@dataclass(frozen=True)
class DerivedValue:
    """One number of a shape.

    Attributes:
        name: Field of :class:`~moeopt.core.shape.MoEShape`.
        value: Its value.
        source: The key, its value, and what was done with it.
    """

    name: str
    value: Any
    source: str


@dataclass
class Lookup:
    """The keys of one config, read by the rules of one family.

    Attributes:
        config: The model's config.
        family: Which keys hold what.
        overrides: Fields given by hand: they are not looked for.
        values: What was found, in order.
        notes: What the user should know.
    """

    config: ModelConfig
    family: Family
    overrides: Mapping[str, Any]
    values: list[DerivedValue] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def record(self, name: str, value: Any, source: str) -> None:
        """Records a number and its source."""
        self.values.append(DerivedValue(name, value, source))

    def given(self, name: str) -> int | None:
        """The number given by hand, recorded; None if there is none.

        Raises:
            InvalidInputError: It is not a positive whole number.
        """
        if name not in self.overrides:
            return None
        value = self.overrides[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInputError(f"{OPTIONS[name]} is {value!r}: give a whole number of at least 1")
        self.record(name, value, f"given by hand ({OPTIONS[name]})")
        return value

    def number(self, name: str, keys: Sequence[str]) -> int:
        """A number given by hand, else that of the first key, recorded."""
        value = self.given(name)
        if value is None:
            key, value = self.find(name, keys)
            self.record(name, value, f"{key} = {value}")
        return value

    def find(self, name: str, keys: Sequence[str]) -> tuple[str, int]:
        """(key, number) of the first key that is there.

        Raises:
            InvalidInputError: None is there, they contradict each other, or the value is not a whole number.
        """
        found = self.first_present(keys, name)
        if found is None and self.family is GENERIC and name == "intermediate_size":
            found = self._dense_size()
        if found is None:
            raise InvalidInputError(
                f"{self.config.path}: no {name} (looked for {', '.join(self.config.prefix + k for k in keys)}); "
                f"give {OPTIONS[name]} by hand"
            )
        return self.check(name, *found)

    def first_present(self, keys: Sequence[str], name: str | None = None) -> tuple[str, Any] | None:
        """(key, value) of the first key that is there; of generic keys, all that are there must agree on ``name``."""
        found = [f for f in (self.config.get(key) for key in keys) if f is not None]
        if name and self.family is GENERIC and len({repr(v) for _, v in found}) > 1:
            said = ", ".join(f"{k} = {short(v)}" for k, v in found)
            raise InvalidInputError(f"{self.config.path}: {name} is ambiguous ({said}); give {OPTIONS[name]} by hand")
        return found[0] if found else None

    def check(self, name: str, key: str, value: Any) -> tuple[str, int]:
        """The value as a whole number; a list has one per layer, or one per kind of expert."""
        path, option = self.config.path, OPTIONS[name]
        if isinstance(value, list) and value:
            rest = [v for v in value if v != value[0]]
            if rest and self.family.per_layer == "first":
                self.notes.append(f"{key} = {short(value)}" + ": the first is the text experts'; tune the others apart")
            elif rest:
                raise InvalidInputError(
                    f"{path}: {key} differs between layers ({_listed(value)}); give {option} by hand"
                )
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise InvalidInputError(
                f"{path}: {key} is {short(value)}, a whole number is expected; give {option} by hand"
            )
        if value == 0 and name != "num_experts":
            raise InvalidInputError(f"{path}: {key} = 0; give {option} by hand")
        return key, value

    def shared_experts(self) -> tuple[str, int]:
        """What says that there are shared experts, and their number; ("", 0) where there are none."""
        found = self.first_present(self.family.shared)
        if found is not None:
            value = found[1]
            if isinstance(value, list):
                value = value[0] if value else 0
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1024:
                return f"{found[0]} = {value}", value
        size = self.first_present((self.family.shared_size,)) if self.family.shared_size else None
        if size is not None and isinstance(size[1], int) and size[1] > 0:
            return f"{size[0]} = {size[1]}", 1
        return "", 0

    def _dense_size(self) -> tuple[str, Any] | None:
        """``intermediate_size``, where nothing says that it is that of dense layers or shared experts."""
        if any(self.config.get(k) for k in (*_DENSE_SIGNS, *GENERIC.shared)):
            return None
        found = self.config.get("intermediate_size")
        if found:
            self.notes.append(f"{found[0]} is taken as the size of one expert, as there is no key of experts' own")
        return found


def _listed(value: list[Any]) -> str:
    seen = list(dict.fromkeys(short(v, 20) for v in value))
    return ", ".join(seen[:4]) + (", ..." if len(seen) > 4 else "")
