"""Facts of a cell that are kept beside its trials: reference timings, rooflines, finals, runs.

They are user attributes of the cell's study, one for each fact and role: ``default_up``, ``winner_up``,
``roofline_up``, ``bytes_up``, ``finals``, ``run:TAG``. Only this module knows these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self, get_args

import msgspec

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES, Role

BaselineKind = Literal["default", "winner"]
_RUN: Final = "run:"


class Baseline(msgspec.Struct, frozen=True):
    """Timing of one config for reference, which is not a trial.

    Attributes:
        config: What was timed.
        us: Microseconds per launch, or None where it cannot run.
    """

    config: LaunchConfig
    us: float | None = None

    def encode(self) -> dict[str, Any]:
        """As stored, JSON-ready."""
        return {"config": self.config.to_dict(), "us": self.us}

    @classmethod
    def decode(cls, data: Any) -> Self:
        """The inverse of :meth:`encode`."""
        config = LaunchConfig.from_dict(data["config"])
        return msgspec.convert({**data, "config": config}, cls, from_attributes=True)


class Run(msgspec.Struct, frozen=True):
    """One run of a tune, kept with the first of its cells.

    Attributes:
        tag: Digest of all that makes two runs the same; every trial of the run carries it.
        portfolio: Configs it tries first. It grows with the database, and a replay needs the same.
        finished: Whether it came to its end.
        space: Name of the space that it searches.
        params: Keys of that space.
        trials: Its budget per cell.
        seed: Of its search.
        batch_sizes: What it tunes.
    """

    tag: str
    portfolio: tuple[LaunchConfig, ...] = ()
    finished: bool = False
    space: str = ""
    params: tuple[str, ...] = ()
    trials: int = 0
    seed: int | None = None
    batch_sizes: tuple[int, ...] = ()

    def encode(self) -> dict[str, Any]:
        """As stored, JSON-ready; the tag is in the attribute's name."""
        return {
            "portfolio": [config.to_dict() for config in self.portfolio],
            "finished": self.finished,
            "space": self.space,
            "params": list(self.params),
            "trials": self.trials,
            "seed": self.seed,
            "batch_sizes": list(self.batch_sizes),
        }

    @classmethod
    def decode(cls, tag: str, data: Any) -> Self:
        """The inverse of :meth:`encode`."""
        portfolio = [LaunchConfig.from_dict(config) for config in data.get("portfolio", ())]
        return msgspec.convert({**data, "tag": tag, "portfolio": portfolio}, cls, from_attributes=True)


class CellFacts(msgspec.Struct, frozen=True):
    """All that is kept of a cell beside its trials; what is by role, is by each of the cell's roles.

    Attributes:
        baselines: Timings of the engine's default config and, in joint mode, of the winner with each projection alone.
        roofline_us: Microseconds below which no kernel can go.
        launch_bytes: Bytes that a launch moves at least.
        finals: Median microseconds of each finalist in each pass; None before there were finals.
        runs: Runs that began with this cell, by tag.
    """

    baselines: Mapping[tuple[BaselineKind, Role], Baseline] = {}
    roofline_us: Mapping[Role, float] = {}
    launch_bytes: Mapping[Role, int] = {}
    finals: Mapping[LaunchConfig, tuple[float, ...]] | None = None
    runs: Mapping[str, Run] = {}

    def encode(self) -> dict[str, Any]:
        """User attributes of the cell's study, JSON-ready."""
        out: dict[str, Any] = {}
        out |= {f"{kind}_{role}": baseline.encode() for (kind, role), baseline in self.baselines.items()}
        out |= {f"roofline_{role}": us for role, us in self.roofline_us.items()}
        out |= {f"bytes_{role}": number for role, number in self.launch_bytes.items()}
        out |= {_RUN + tag: run.encode() for tag, run in self.runs.items()}
        if self.finals is not None:
            out["finals"] = [[config.to_dict(), list(us)] for config, us in self.finals.items()]
        return out

    @classmethod
    def decode(cls, attrs: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`encode`; attributes of other names are passed over.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: One of them is not as it is stored here.
        """
        kinds: tuple[BaselineKind, ...] = get_args(BaselineKind)
        finals = attrs.get("finals")
        return cls(
            baselines={
                (kind, role): Baseline.decode(attrs[f"{kind}_{role}"])
                for kind in kinds
                for role in ROLES
                if f"{kind}_{role}" in attrs
            },
            roofline_us=msgspec.convert(_by_role("roofline", attrs), dict[Role, float]),
            launch_bytes=msgspec.convert(_by_role("bytes", attrs), dict[Role, int]),
            finals=None if finals is None else {LaunchConfig.from_dict(config): tuple(us) for config, us in finals},
            runs={
                tag: Run.decode(tag, data)
                for name, data in attrs.items()
                for tag in (name.removeprefix(_RUN),)
                if tag != name
            },
        )


def _by_role(name: str, attrs: Mapping[str, Any]) -> dict[Role, Any]:
    return {role: attrs[f"{name}_{role}"] for role in ROLES if f"{name}_{role}" in attrs}
