"""Spaces of launch configs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeopt.core.config import CONFIG_KEYS, PARAMETERS, REQUIRED_KEYS, LaunchConfig, check_parameters
from moeopt.core.parameters import Value
from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


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
            check_parameters([key], "search space")
            for value in values:
                if not PARAMETERS[key].accepts(value):
                    raise InvalidInputError(f"search space value {value!r} of {key} cannot be used: see the grid's")
            if len(set(values)) != len(values):
                raise InvalidInputError(f"search space values of {key} repeat: {list(values)!r}")

    @classmethod
    def grid(cls, shape: MoEShape) -> SearchSpace:
        """The grid that the published scripts walk: 1,920 configs, 1,280 for block_k 128."""
        values = {key: row.grid for key, row in PARAMETERS.items() if row.grid}
        return cls("grid", _without_bad_block_k(values, shape))

    @classmethod
    def wide(cls, shape: MoEShape, *, extras: Collection[str] = ("maxnreg",)) -> SearchSpace:
        """More values per parameter, all of which the engines accept in their files.

        Args:
            shape: The layer.
            extras: Keys beyond the six that the kernel can use: ``maxnreg``, ``USE_TMA`` (SGLang's
                down projection).

        Raises:
            InvalidInputError: A key is unknown.
        """
        check_parameters(extras, "search space")
        values = {key: row.values for key, row in PARAMETERS.items() if row.required or key in extras}
        return cls("wide", _without_bad_block_k(values, shape))

    @classmethod
    def named(cls, name: str, shape: MoEShape, *, extras: Collection[str] = ("maxnreg",)) -> SearchSpace:
        """``grid`` or ``wide``.

        Raises:
            InvalidInputError: Another name was given, or a key is unknown.
        """
        check_parameters(extras, "search space")
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
        """The space as Optuna distributions: those of the study database, whatever the space.

        They are wider than the space, and hold values that are between its own: a sampler's suggestion stands for
        the nearest legal config.
        """
        return {key: PARAMETERS[key].distribution() for key in self.values}

    def params(self, config: LaunchConfig) -> dict[str, Any]:
        """The config as Optuna parameters of :meth:`distributions`."""
        return {key: getattr(config, CONFIG_KEYS[key]) for key in self.values}

    def config(self, params: Mapping[str, Any]) -> LaunchConfig:
        """Optuna parameters as a config."""
        return LaunchConfig(**{CONFIG_KEYS[key]: params[key] for key in self.values})

    def contains(self, config: LaunchConfig) -> bool:
        """Whether the config is one of the space's."""
        return all(value in self.values.get(key, (PARAMETERS[key].unset,)) for key, value in config.values().items())


def _without_bad_block_k(values: Mapping[str, tuple[Value, ...]], shape: MoEShape) -> dict[str, tuple[Value, ...]]:
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
