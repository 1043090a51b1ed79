"""Launch configs: how one launch of the kernel is cut into programs.

The fields of :class:`LaunchConfig` are the table of launch parameters: an engine's entry, Optuna's distributions, a
surrogate's features, a trial in the database and a claim are all derived from these rows.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from moeopt.core.parameters import Parameter, Value
from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Number = TypeVar("Number", np.int64, np.float64)
_TILE: Final = (16, 32, 64, 128, 256)


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

    block_size_m: int = field(metadata=Parameter("BLOCK_SIZE_M", _TILE, grid=_TILE, bounds=(8, 512)).row())
    block_size_n: int = field(
        metadata=Parameter("BLOCK_SIZE_N", _TILE, grid=(32, 64, 128, 256), bounds=(8, 512), label="x").row()
    )
    block_size_k: int = field(
        metadata=Parameter("BLOCK_SIZE_K", (32, 64, 128, 256), grid=(64, 128, 256), bounds=(16, 512), label="x").row()
    )
    group_size_m: int = field(
        metadata=Parameter(
            "GROUP_SIZE_M", (1, 2, 4, 8, 16, 32, 64), grid=(1, 16, 32, 64), bounds=(1, 128), step=0.5, label=" G"
        ).row()
    )
    num_warps: int = field(metadata=Parameter("num_warps", (2, 4, 8), grid=(4, 8), bounds=(1, 32), label=" w").row())
    num_stages: int = field(
        metadata=Parameter(
            "num_stages", (2, 3, 4, 5, 6, 7, 8), grid=(2, 3, 4, 5), bounds=(1, 12), log=False, step=0.7, label=" s"
        ).row()
    )
    # No limit on registers behaves as a limit at the most that a thread can have.
    maxnreg: int = field(
        default=0,
        metadata=Parameter(
            "maxnreg", (0, 96, 128, 168), bounds=(0, 255), log=False, step=2.0, unset=0, unset_as=255, label=" r"
        ).row(),
    )
    use_tma: bool = field(
        default=False,
        metadata=Parameter(
            "USE_TMA", (False, True), log=False, step=2.0, unset=False, label=" tma", engines=("sglang",)
        ).row(),
    )

    def values(self) -> dict[str, Value]:
        """All parameters by key, unset ones too."""
        return {key: getattr(self, name) for key, name in CONFIG_KEYS.items()}

    def to_dict(self) -> dict[str, Value]:
        """The entry of an engine's config file: the required keys, the others only where set."""
        return {key: value for key, value in self.values().items() if value != PARAMETERS[key].unset}

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
            check_parameters([key], "launch config")
            PARAMETERS[key].check(value)
        return cls(**{CONFIG_KEYS[k]: v for k, v in values.items()})

    def numbers(self) -> list[int]:
        """The parameters as numbers, in the order of the fields: a short form, whose inverse is :meth:`of_numbers`."""
        return [int(getattr(self, name)) for name in CONFIG_KEYS.values()]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> LaunchConfig:
        """The inverse of :meth:`numbers`; what was written before a parameter was known may be shorter."""
        rows = zip(CONFIG_KEYS.values(), PARAMETERS.values(), numbers, strict=False)
        values: dict[str, Any] = {name: row.from_number(number) for name, row, number in rows}
        return cls(**values)

    def __str__(self) -> str:
        shown = ((PARAMETERS[key], value) for key, value in self.to_dict().items())
        return "".join(row.label if row.switch else f"{row.label}{value}" for row, value in shown)


PARAMETERS: Final[Mapping[str, Parameter]] = {
    row.key: row for row in (Parameter.of(f.metadata) for f in fields(LaunchConfig))
}
# Key in an engine's config file -> field of LaunchConfig, in the order the engines write them.
CONFIG_KEYS: Final[Mapping[str, str]] = {Parameter.of(f.metadata).key: f.name for f in fields(LaunchConfig)}
REQUIRED_KEYS: Final = tuple(key for key, row in PARAMETERS.items() if row.required)
# Key -> column of a table of configs.
COLUMN: Final[Mapping[str, int]] = {key: i for i, key in enumerate(PARAMETERS)}


def check_parameters(keys: Iterable[str], what: str, known: Collection[str] = PARAMETERS) -> None:
    """Raises InvalidInputError for a key that is none of a config's, such as the name of its field."""
    for key in keys:
        if key not in known:
            field_of = next((k for k, name in CONFIG_KEYS.items() if name == key and k in known), None)
            hint = f"give {field_of}" if field_of else f"the keys are {', '.join(known)}"
            raise InvalidInputError(f"{what} key {key!r} is unknown: {hint}")


_numbers = operator.attrgetter(*CONFIG_KEYS.values())


def config_table(configs: Sequence[LaunchConfig]) -> NDArray[np.int64]:
    """The configs' numbers, int64 [configs, parameters]; :data:`COLUMN` says where each parameter is."""
    return np.array(list(map(_numbers, configs)), dtype=np.int64).reshape(len(configs), len(COLUMN))


def configs_of(table: NDArray[np.int64]) -> tuple[LaunchConfig, ...]:
    """The inverse of :func:`config_table`."""
    return tuple(map(LaunchConfig.of_numbers, table.tolist()))


def columns(table: NDArray[Number], *keys: str) -> NDArray[Number]:
    """Some parameters of a :func:`config_table`, [len(keys), configs]."""
    return table[:, [COLUMN[key] for key in keys]].T
