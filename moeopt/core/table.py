"""Table of launch configs: for each batch size one of each role, as an engine's files have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from moeopt.core.config import LaunchConfig
from moeopt.core.parameters import Value
from moeopt.core.shape import Role
from moeopt.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class ConfigPair:
    """The launch configs of one batch size; in joint mode twice the same."""

    up: LaunchConfig
    down: LaunchConfig

    def config(self, role: Role) -> LaunchConfig:
        """The config of one role."""
        return self.up if role == "up" else self.down

    def to_dict(self) -> dict[str, dict[str, Value]]:
        """Both entries of an engine's files, JSON-ready."""
        return {"up": self.up.to_dict(), "down": self.down.to_dict()}


@dataclass(frozen=True)
class ConfigTable(Mapping[int, ConfigPair]):
    """Batch size -> its launch configs.

    Attributes:
        pairs: By batch size, in the order of the file or of the tune.
        joint: Whether one config serves both roles.
    """

    pairs: Mapping[int, ConfigPair]
    joint: bool = False

    @classmethod
    def of(cls, up: Mapping[int, LaunchConfig], down: Mapping[int, LaunchConfig] | None = None) -> ConfigTable:
        """A table from the configs of each role.

        Args:
            up: Batch size -> config of the up projection (of both in joint mode).
            down: The same for down, None in joint mode.

        Raises:
            InvalidInputError: A batch size has a config for one role only.
        """
        both = up if down is None else down
        odd = sorted(set(up) ^ set(both))
        if odd:
            raise InvalidInputError(
                f"batch size {odd[0]} has a config for one role only: give both roles the same batch sizes"
            )
        return cls({m: ConfigPair(up[m], both[m]) for m in up}, joint=down is None)

    def __getitem__(self, batch_size: int) -> ConfigPair:
        return self.pairs[batch_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def take(self, batch_sizes: Iterable[int]) -> ConfigTable:
        """Only these batch sizes.

        Raises:
            InvalidInputError: One is not in the table.
        """
        wanted = tuple(batch_sizes)
        missing = [m for m in wanted if m not in self.pairs]
        if missing:
            raise InvalidInputError(f"batch size {missing[0]} was not tuned: tuned are {', '.join(map(str, self))}")
        return ConfigTable({m: self.pairs[m] for m in wanted}, self.joint)

    def joined(self) -> ConfigTable:
        """Up's configs for both roles."""
        return ConfigTable({m: ConfigPair(pair.up, pair.up) for m, pair in self.pairs.items()}, joint=True)

    def with_pairs(self, pairs: Mapping[int, ConfigPair]) -> ConfigTable:
        """These as well, or instead of those of the same batch size; ascending."""
        return ConfigTable(dict(sorted({**self.pairs, **pairs}.items())), self.joint)
