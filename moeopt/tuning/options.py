"""Options of a tune: what it is told to do, and everything that it is asked for before a device is there."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Meta

from moeopt.core.fields import Count, check_fields, check_keys, checked, field_types
from moeopt.core.shape import DEFAULT_BATCH_SIZES, ROLES, BatchSizes, MoEShape, Role, check_batch_sizes
from moeopt.core.trial import Cell, Mode
from moeopt.errors import InvalidInputError
from moeopt.measure.options import DeviceOptions

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

DEFAULT_STORAGE: Final = "sqlite:///studies/moeopt.db"


@dataclass(frozen=True)
class TuneOptions:
    """What a tune is to do, apart from where.

    Attributes:
        batch_sizes: M, ascending.
        mode: ``split``: a config per projection; ``joint``: one for both.
        space: ``grid`` or ``wide``.
        trials: Most launch configs that may be timed per (batch size, role).
        timeout: Seconds after which the run ends with the best so far, or None.
        seed: Of the search.
        sampler: Any Optuna sampler, or None for moeopt's own search.
        pruner: Any Optuna pruner, or None for moeopt's racing.
    """

    batch_sizes: BatchSizes = DEFAULT_BATCH_SIZES
    mode: Mode = "split"
    space: str = "grid"
    trials: Count = 24
    timeout: float | None = None
    seed: Annotated[int, Meta(ge=0, lt=2**32, description="a whole number from 0 to 4294967295")] = 0
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "batch_sizes", check_batch_sizes(self.batch_sizes))

    def cells(self) -> tuple[Cell, ...]:
        """Every (role, batch size) that gets a config."""
        roles: Sequence[Role | Literal["joint"]] = ROLES if self.mode == "split" else ("joint",)
        return tuple(Cell(role, m) for m in self.batch_sizes for role in roles)


@dataclass(frozen=True)
class TuneRequest:
    """Everything that a tune is asked for, before a device is opened.

    Attributes:
        shape: The layer, or None for that of the recording that is replayed.
        gpu: ``cuda:N``, ``all``, ``recorded:FILE``, or None for the first CUDA GPU.
        storage: URL or file of the study database.
        batch_sizes: M, or None for all of a recording, or else the default.
        device: How a GPU is used.
        search: What is searched; its batch sizes are those that count once the device is open.
        stand_in: A recording that is replayed where there is no GPU and none was named.
    """

    shape: MoEShape | None = None
    gpu: str | None = None
    storage: str = DEFAULT_STORAGE
    batch_sizes: BatchSizes | None = None
    device: DeviceOptions = field(default_factory=DeviceOptions)
    search: TuneOptions = field(default_factory=TuneOptions)
    stand_in: Path | None = None

    def with_options(self, given: object, what: str = "option") -> TuneRequest:
        """A copy with other options.

        Args:
            given: Their values by the names that they have in a study file and for :func:`moeopt.tune`.
            what: What they are, for the message.

        Raises:
            InvalidInputError: One is unknown, of another type, or cannot be.
        """
        options = check_keys(given, OPTIONS, what)
        for name in ("timeout", "wait_idle"):
            if name in options:
                options[name] = parse_timeout(options[name], name)
        parts = {part: {name: options.pop(name) for name in names if name in options} for part, names in _PARTS}
        for name in options:
            options[name] = checked(options[name], field_types(TuneRequest)[name], name)
        device, search = replace(self.device, **parts["device"]), replace(self.search, **parts["search"])
        return replace(self, device=device, search=search, **options)


def _names(kind: type[DeviceOptions] | type[TuneOptions], *, without: Collection[str]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind) if one.name not in without)


# Of the options that have a name of their own: what they are of, where that is not the request itself.
_PARTS: Final = (
    ("device", _names(DeviceOptions, without=("seed", "compile_cache"))),
    ("search", _names(TuneOptions, without=("batch_sizes", "sampler", "pruner"))),
)
OPTIONS: Final = ("gpu", "storage", "batch_sizes", *(name for _, names in _PARTS for name in names))


def parse_timeout(text: str | float | None, name: str = "timeout") -> float | None:
    """``90``, ``90s``, ``5m`` or ``1h`` as seconds.

    Args:
        text: What was given.
        name: Of the option, for the message.

    Raises:
        InvalidInputError: It is something else or not positive.
    """
    if text is None:
        return None
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|h|)\s*", str(text))
        if not match:
            raise InvalidInputError(f"{name} is {text!r}: give seconds, or 90s, 5m, 1h")
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    if not seconds > 0:
        raise InvalidInputError(f"{name} is {text!r}: give more than 0 seconds")
    return seconds
