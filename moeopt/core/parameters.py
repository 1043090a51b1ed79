"""Parameters of a launch: what one row of the table says of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from optuna.distributions import BaseDistribution

Value = int | bool
_ROW: Final = "parameter"


@dataclass(frozen=True)
class Parameter:
    """One launch parameter: how engines, Optuna, the search and people see it.

    Attributes:
        key: Its key in an engine's config file, and its name in Optuna.
        values: The values of the wide space, ascending.
        grid: The values of the grid that the published scripts walk; none where they do not know it.
        bounds: Least and greatest value in the study database: wider than any space, so that every run's trials
            share one search space, and narrow enough for importance plots, which integrate over them. None for
            a switch.
        log: Whether Optuna, and a surrogate, see its logarithm.
        step: Units of a surrogate's feature per value, or per power of two.
        unset: The value that a config has where the key is absent; None where an engine's file must have the key.
        unset_as: What a surrogate takes the unset value for.
        label: How a config's text shows it.
        engines: Names of the engines whose files may have the key; None for all.
    """

    key: str
    values: tuple[Value, ...]
    grid: tuple[Value, ...] = ()
    bounds: tuple[int, int] | None = None
    log: bool = True
    step: float = 1.0
    unset: Value | None = None
    unset_as: int | None = None
    label: str = ""
    engines: tuple[str, ...] | None = None

    def row(self) -> Mapping[str, Parameter]:
        """The parameter as the metadata of a dataclass field."""
        return {_ROW: self}

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> Parameter:
        """The inverse of :meth:`row`."""
        found = metadata[_ROW]
        assert isinstance(found, Parameter)
        return found

    @property
    def required(self) -> bool:
        """Whether an entry of an engine's file must have the key."""
        return self.unset is None

    @property
    def switch(self) -> bool:
        """Whether it is on or off, not a number."""
        return self.bounds is None

    def taken_by(self, engine: str) -> bool:
        """Whether an engine's file may have the key."""
        return self.engines is None or engine in self.engines

    def accepts(self, value: object) -> bool:
        """Whether a config may have this value: a number of at least 1 (0: no limit), or true or false."""
        if self.switch:
            return isinstance(value, bool)
        return isinstance(value, int) and not isinstance(value, bool) and value >= (1 if self.unset is None else 0)

    def check(self, value: object, what: str = "launch config") -> None:
        """Raises InvalidInputError where :meth:`accepts` says no."""
        if not self.accepts(value):
            wanted = "true or false" if self.switch else "a whole number of at least 1"
            raise InvalidInputError(f"{what} {self.key} is {value!r}: give {wanted}")

    def from_number(self, number: int) -> Value:
        """A value from its number: a switch's 0 and 1 are false and true."""
        return bool(number) if self.switch else int(number)

    @lru_cache(maxsize=4096)  # noqa: B019  (the rows of the table live as long as the process)
    def distribution(self, value: Value | None = None) -> BaseDistribution:
        """As Optuna knows it, the same in every study; wider only for a value beyond the bounds."""
        from optuna.distributions import CategoricalDistribution, IntDistribution

        if self.bounds is None:
            return CategoricalDistribution((False, True))
        low, high = self.bounds
        if value is not None:
            low, high = min(low, int(value)), max(high, int(value))
        return IntDistribution(low, high, log=self.log)

    def feature(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """A surrogate's column for these values, on a scale where 1 is about a step of the grid; same shape."""
        import numpy as np

        if self.unset_as is not None:
            numbers = np.where(numbers > 0, numbers, self.unset_as)
        return (np.log2(numbers) if self.log or self.unset_as is not None else numbers) * self.step
