"""Options of a tune, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from moeopt.core.shape import ROLES, Role, check_batch_sizes
from moeopt.core.trial import Cell, Mode
from moeopt.errors import InvalidInputError

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

    batch_sizes: tuple[int, ...]
    mode: Mode = "split"
    space: str = "grid"
    trials: int = 24
    timeout: float | None = None
    seed: int = 0
    sampler: BaseSampler | None = None
    pruner: BasePruner | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_sizes", check_batch_sizes(self.batch_sizes))
        if self.mode not in get_args(Mode):
            raise InvalidInputError(f"mode {self.mode!r} is unknown: give 'split' or 'joint'")
        check_trials(self.trials)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise InvalidInputError(f"seed is {self.seed!r}: give a whole number from 0 to 4294967295")

    def cells(self) -> tuple[Cell, ...]:
        """Every (role, batch size) that gets a config."""
        roles: Sequence[Role | Literal["joint"]] = ROLES if self.mode == "split" else ("joint",)
        return tuple(Cell(role, m) for m in self.batch_sizes for role in roles)


def check_trials(trials: int) -> int:
    """The number of trials.

    Raises:
        InvalidInputError: It is not a whole number of at least 1.
    """
    if isinstance(trials, bool) or not isinstance(trials, int) or trials <= 0:
        raise InvalidInputError(f"trials is {trials!r}: give a whole number of at least 1")
    return trials


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
