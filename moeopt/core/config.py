"""Launch configs: how one launch of the kernel is cut into programs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    pass


# Key in an engine's config file -> field of LaunchConfig, in the order the engines write them.
CONFIG_KEYS: Final[Mapping[str, str]] = {
    "BLOCK_SIZE_M": "block_size_m",
    "BLOCK_SIZE_N": "block_size_n",
    "BLOCK_SIZE_K": "block_size_k",
    "GROUP_SIZE_M": "group_size_m",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
    "maxnreg": "maxnreg",
    "USE_TMA": "use_tma",
}


REQUIRED_KEYS: Final = tuple(CONFIG_KEYS)[:6]


@dataclass(frozen=True, order=True, slots=True)
class LaunchConfig:
    """How one launch of the kernel is cut into programs, and how Triton compiles it.

    Attributes:
        block_size_m: Rows (token-expert pairs) of one output tile.
        block_size_n: Columns of one output tile.
        block_size_k: Reduction elements loaded per loop step.
        group_size_m: Tiles along M that are launched together for L2 reuse.
        num_warps: Warps per program.
        num_stages: Depth of the software pipeline.
        maxnreg: Most registers per thread, or 0 for no limit.
        use_tma: Whether weights are loaded through the tensor memory accelerator.
    """

    block_size_m: int
    block_size_n: int
    block_size_k: int
    group_size_m: int
    num_warps: int
    num_stages: int
    maxnreg: int = 0
    use_tma: bool = False

    def to_dict(self) -> dict[str, int | bool]:
        """The entry of an engine's config file: the six keys, the others only where set."""
        out: dict[str, int | bool] = {key: getattr(self, CONFIG_KEYS[key]) for key in REQUIRED_KEYS}
        if self.maxnreg:
            out["maxnreg"] = self.maxnreg
        if self.use_tma:
            out["USE_TMA"] = True
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LaunchConfig:
        """The inverse of :meth:`to_dict`; ``SPLIT_K: 1`` is accepted and dropped.

        Raises:
            InvalidInputError: A key is missing or unknown, or a value is not a positive whole number.
        """
        if not isinstance(data, Mapping):
            raise InvalidInputError(f"launch config is {data!r}: a mapping of its keys is expected")
        values = {k: v for k, v in data.items() if not (k == "SPLIT_K" and v == 1)}
        for key in REQUIRED_KEYS:
            if key not in values:
                raise InvalidInputError(f"launch config key {key!r} is missing in {dict(data)!r}")
        for key, value in values.items():
            if key not in CONFIG_KEYS:
                raise InvalidInputError(f"launch config key {key!r} is unknown: the keys are {', '.join(CONFIG_KEYS)}")
            if key == "USE_TMA":
                if not isinstance(value, bool):
                    raise InvalidInputError(f"launch config USE_TMA is {value!r}: give true or false")
            elif isinstance(value, bool) or not isinstance(value, int) or value < (0 if key == "maxnreg" else 1):
                raise InvalidInputError(f"launch config {key} is {value!r}: give a whole number of at least 1")
        return cls(**{CONFIG_KEYS[k]: v for k, v in values.items()})

    def __str__(self) -> str:
        text = (
            f"{self.block_size_m}x{self.block_size_n}x{self.block_size_k} G{self.group_size_m} "
            f"w{self.num_warps} s{self.num_stages}"
        )
        if self.maxnreg:
            text += f" r{self.maxnreg}"
        return text + (" tma" if self.use_tma else "")


_FIELDS: Final = tuple(LaunchConfig.__dataclass_fields__)


_numbers = operator.attrgetter(*_FIELDS)


def config_table(configs: Sequence[LaunchConfig]) -> NDArray[np.int64]:
    """The configs' numbers, int64 [configs, 8], in the order of LaunchConfig's fields."""
    return np.array(list(map(_numbers, configs)), dtype=np.int64).reshape(len(configs), len(_FIELDS))


def configs_of(table: NDArray[np.int64]) -> tuple[LaunchConfig, ...]:
    """The inverse of :func:`config_table`."""
    return tuple(
        LaunchConfig(**dict(zip(_FIELDS, row, strict=True)) | {"use_tma": bool(row[-1])}) for row in table.tolist()
    )
