"""Launch configs and the spaces that they are picked from."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moeopt.core.config import CONFIG_KEYS, REQUIRED_KEYS, LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


_GRID: Final[Mapping[str, tuple[int, ...]]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256),
    "GROUP_SIZE_M": (1, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
_WIDE: Final[Mapping[str, tuple[int, ...]]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "GROUP_SIZE_M": (1, 2, 4, 8, 16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 4, 5, 6, 7, 8),
    "maxnreg": (0, 96, 128, 168),
    "USE_TMA": (False, True),
}


@dataclass(frozen=True)
class SearchSpace:
    """The launch configs that may be tried, before a GPU's limits are looked at.

    Attributes:
        name: ``grid``, ``wide`` or a name of the user's.
        values: For each key of an engine's config entry, the values that may be tried, ascending.
    """

    name: str
    values: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        for key in REQUIRED_KEYS:
            if not self.values.get(key):
                raise InvalidInputError(f"search space {self.name!r} has no values for {key}")
        for key, values in self.values.items():
            if key not in CONFIG_KEYS:
                raise InvalidInputError(f"search space key {key!r} is unknown: the keys are {', '.join(CONFIG_KEYS)}")
            for value in values:
                number = isinstance(value, int) and not isinstance(value, bool) and value >= (key != "maxnreg")
                if not (isinstance(value, bool) if key == "USE_TMA" else number):
                    raise InvalidInputError(f"search space value {value!r} of {key} cannot be used: see the grid's")
            if len(set(values)) != len(values):
                raise InvalidInputError(f"search space values of {key} repeat: {list(values)!r}")

    @classmethod
    def grid(cls, shape: MoEShape) -> SearchSpace:
        """The grid that the published scripts walk: 1,920 configs, 1,280 for block_k 128."""
        return cls("grid", _without_bad_block_k(_GRID, shape))

    @classmethod
    def wide(cls, shape: MoEShape, *, extras: Collection[str] = ("maxnreg",)) -> SearchSpace:
        """More values per parameter, all of which the engines accept in their files.

        Args:
            shape: The layer.
            extras: Keys beyond the six that the kernel can use: ``maxnreg``, ``USE_TMA`` (SGLang's
                down projection).
        """
        values = {k: v for k, v in _without_bad_block_k(_WIDE, shape).items() if k in REQUIRED_KEYS or k in extras}
        return cls("wide", values)

    @classmethod
    def named(cls, name: str, shape: MoEShape, *, extras: Collection[str] = ("maxnreg",)) -> SearchSpace:
        """``grid`` or ``wide``.

        Raises:
            InvalidInputError: Another name was given.
        """
        if name == "grid":
            return cls.grid(shape)
        if name == "wide":
            return cls.wide(shape, extras=extras)
        raise InvalidInputError(f"search space {name!r} is unknown: give 'grid' or 'wide'")

    def __len__(self) -> int:
        size = 1
        for values in self.values.values():
            size *= len(values)
        return size

    def configs(self) -> tuple[LaunchConfig, ...]:
        """All configs, in a fixed order."""
        keys = [CONFIG_KEYS[key] for key in self.values]
        return tuple(
            LaunchConfig(**dict(zip(keys, combo, strict=True))) for combo in itertools.product(*self.values.values())
        )

    def distributions(self) -> dict[str, BaseDistribution]:
        """The space as Optuna distributions, one categorical per key that has a choice."""
        from optuna.distributions import CategoricalDistribution

        return {key: CategoricalDistribution(values) for key, values in self.values.items()}

    def params(self, config: LaunchConfig) -> dict[str, Any]:
        """The config as Optuna parameters of :meth:`distributions`."""
        return {key: getattr(config, CONFIG_KEYS[key]) for key in self.values}

    def config(self, params: Mapping[str, Any]) -> LaunchConfig:
        """Optuna parameters as a config."""
        return LaunchConfig(**{CONFIG_KEYS[key]: params[key] for key in self.values})

    def contains(self, config: LaunchConfig) -> bool:
        """Whether the config is one of the space's."""
        return all(
            getattr(config, field) in self.values.get(key, (_UNSET[field],) if field in _UNSET else ())
            for key, field in CONFIG_KEYS.items()
        )


_UNSET: Final[Mapping[str, Any]] = {"maxnreg": 0, "use_tma": False}


def _without_bad_block_k(values: Mapping[str, tuple[int, ...]], shape: MoEShape) -> dict[str, tuple[int, ...]]:
    """Drops BLOCK_SIZE_K values that straddle two scales.

    With block-wise scales SGLang's kernel reads one scale per loop step, so a BLOCK_SIZE_K over
    block_k gives wrong numbers, and one that does not divide block_k straddles two.
    """
    out = dict(values)
    limit = shape.block_shape[1] if shape.block_shape else None
    if limit is not None:
        out["BLOCK_SIZE_K"] = tuple(bk for bk in values["BLOCK_SIZE_K"] if limit % bk == 0)
        if not out["BLOCK_SIZE_K"]:
            raise InvalidInputError(
                f"block_shape {list(shape.block_shape or ())} leaves no BLOCK_SIZE_K: block_k must be a multiple of "
                f"{min(values['BLOCK_SIZE_K'])}"
            )
    return out
