"""Outcome of a tune: the best configs, per batch size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigPair, ConfigTable
from moeopt.errors import ExportError, InvalidInputError
from moeopt.export.names import nearest_key
from moeopt.files import write_file

if TYPE_CHECKING:
    import pandas

    from moeopt.storage.key import StudyKey


@dataclass(frozen=True, slots=True)
class RoleResult:
    """The best config of one projection at one batch size.

    Attributes:
        config: How to launch.
        us: Median microseconds per launch.
        measured: Configs timed for this (batch size, role), from the database or now.
        default_us: The engine's default config, measured on the same device, or None.
        roofline_us: Microseconds at the GPU's measured memory and matmul rates, or None. The rates are those of
            large copies, sums and products: on an H200 the best configs came within 1 to 4 % of them.
    """

    config: LaunchConfig
    us: float
    measured: int
    default_us: float | None = None
    roofline_us: float | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The best launch of the layer at one batch size: both projections.

    Attributes:
        batch_size: Tokens in one forward pass.
        up: Gate and up projection.
        down: Down projection. In joint mode the config is up's.
        joint_config: The best config that was timed for both projections, or None where there is none.
        joint_us: Both projections with it.
    """

    batch_size: int
    up: RoleResult
    down: RoleResult
    joint_config: LaunchConfig | None = None
    joint_us: float | None = None

    @property
    def pair(self) -> ConfigPair:
        """Both projections' configs."""
        return ConfigPair(self.up.config, self.down.config)

    @property
    def total_us(self) -> float:
        """Both projections together."""
        return self.up.us + self.down.us

    @property
    def default_us(self) -> float | None:
        """Both projections with the engine's default config, or None."""
        if self.up.default_us is None or self.down.default_us is None:
            return None
        return self.up.default_us + self.down.default_us

    @property
    def roofline_us(self) -> float | None:
        """Both projections at the roofline, or None."""
        if self.up.roofline_us is None or self.down.roofline_us is None:
            return None
        return self.up.roofline_us + self.down.roofline_us

    @property
    def speedup(self) -> float | None:
        """Default time over tuned time, or None where the default is not known."""
        return self.default_us / self.total_us if self.default_us is not None else None

    @property
    def roofline_fraction(self) -> float | None:
        """Roofline time over tuned time (1 is the roofline), or None."""
        return self.roofline_us / self.total_us if self.roofline_us is not None else None

    def texts(self) -> dict[str, str]:
        """The row as people read it, by the title of its column; ``-`` where something is not known."""
        speedup, fraction = self.speedup, self.roofline_fraction
        return {
            "M": str(self.batch_size),
            "default µs": "-" if self.default_us is None else f"{self.default_us:.1f}",
            "up µs": f"{self.up.us:.1f}",
            "down µs": f"{self.down.us:.1f}",
            "both µs": f"{self.total_us:.1f}",
            "speed-up": "-" if speedup is None else f"{speedup:.2f}x",
            "roofline": "-" if fraction is None else f"{100 * fraction:.0f} %",
            "up config": str(self.up.config),
            "down config": str(self.down.config),
            "timed": f"{self.up.measured}+{self.down.measured}",
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        parts = {"up": self.up, "down": self.down}
        return {
            **{r: {"config": p.config.to_dict(), "us": p.us, "measured": p.measured} for r, p in parts.items()},
            "total_us": self.total_us,
            "default_us": self.default_us,
            "roofline_us": self.roofline_us,
        }


@dataclass(frozen=True, slots=True)
class Counts:
    """How many configs went which way in this run.

    Attributes:
        space: Configs of the space.
        infeasible: Of these, over the GPU's limits: never compiled.
        compiled: (config, role) pairs that compiled.
        rejected: Compiled, but never launched because of their resources.
        measured: (config, batch size, role) that were timed, in full or in part.
        raced_out: Of the measured, those stopped early.
        failed: (config, batch size, role) without a time: compile, runtime, correctness, timeout.
        unique_compiled: Distinct configs that were compiled.
        resumed: (config, batch size, role) that came from the database and were not timed again.
        reasons: Failures by reason.
        elsewhere: Of the measured, those that other processes timed: workers, or another tune of the same study.
        stored: Of those from the database by what they were: ``timed``, ``rejected``, ``failed``, and the (config,
            role) pairs that had been ``compiled``.
    """

    space: int = 0
    infeasible: int = 0
    compiled: int = 0
    rejected: int = 0
    measured: int = 0
    raced_out: int = 0
    failed: int = 0
    unique_compiled: int = 0
    resumed: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    elsewhere: int = 0
    stored: Mapping[str, int] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """What people want to know, by its title: with what an earlier run or another process did."""
        out = {"configs": str(self.space), "over the GPU's limits": str(self.infeasible)} if self.space else {}
        for name, now in (
            ("compiled", self.compiled),
            ("rejected", self.rejected),
            ("timed", self.measured),
            ("failed", self.failed),
        ):
            before = self.stored.get(name, 0)
            out[name] = str(now + before) if not before else f"{now + before} ({now} now, {before} before)"
        if self.elsewhere:
            out["timed by other processes"] = str(self.elsewhere)
        out["raced out now"] = str(self.raced_out)
        return out | {f"failed: {reason}": str(count) for reason, count in sorted(self.reasons.items())}

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        kept = asdict(self)  # in the keys that programs know
        return {key: value for key, value in kept.items() if key not in ("elsewhere", "stored")}


@dataclass(frozen=True)
class Outcome:
    """The best configs of a shape, per batch size.

    Attributes:
        shape: The layer.
        gpu: Name of the GPU that its times are of.
        info: Kernel, versions, routing, and whether the times are replayed.
        mode: ``split`` or ``joint``.
        space: Name of the search space.
        seed: Of the search, or None where results were loaded.
        wall_s: Seconds the run took.
        rows: Per batch size.
        counts: What happened to the configs in this run.
        notes: Plain sentences that a user must see (a timeout, another kernel than the engine's, ...).
        timings: Seconds of the run by part (search, measure, storage, ...).
    """

    shape: MoEShape
    gpu: str
    info: Provenance
    mode: Literal["split", "joint"]
    space: str
    seed: int | None
    wall_s: float
    rows: Mapping[int, BatchResult]
    counts: Counts
    notes: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    storage: str | None = field(default=None, repr=False, compare=False)
    key: StudyKey | None = field(default=None, repr=False, compare=False)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The tuned batch sizes, ascending."""
        return tuple(sorted(self.rows))

    def best(self, batch_size: int) -> BatchResult:
        """The best launch for one batch size.

        Raises:
            InvalidInputError: The batch size was not tuned.
        """
        row = self.rows.get(batch_size)
        if row is None:
            raise InvalidInputError(
                f"batch size {batch_size} was not tuned: tuned are {', '.join(map(str, self.batch_sizes))}"
            )
        return row

    def geomean_speedup(self) -> float | None:
        """Geometric mean over batch sizes of default over tuned time, or None where no default is known."""
        known = [row.speedup for row in self.rows.values() if row.speedup is not None]
        return math.exp(sum(map(math.log, known)) / len(known)) if known else None

    def configs_for(self, engine: str) -> ConfigTable:
        """The configs that an engine's files hold.

        Raises:
            ExportError: There are none that the engine can use.
        """
        if not self.rows:
            raise ExportError("nothing to export: no batch size has a timed config yet")
        if engines.get(engine).split or self.mode == "joint":
            return ConfigTable({m: row.pair for m, row in self.rows.items()}, joint=self.mode == "joint")
        table = ConfigTable.of({m: row.joint_config for m, row in self.rows.items() if row.joint_config is not None})
        if not table:
            raise ExportError(
                f"no config was timed for both projections, which {engines.get(engine).title} needs: tune with "
                "--mode joint"
            )
        return table

    def left_out(self, engine: str) -> str:
        """One line on the tuned batch sizes that an engine's file cannot hold; empty where it holds all."""
        table = self.configs_for(engine)
        missing = [m for m in self.batch_sizes if m not in table]
        if not missing:
            return ""
        runs = ", ".join(f"the config of {nearest_key(sorted(table), m)} at M={m}" for m in missing)
        return (
            f"no config was timed for both projections at batch size {', '.join(map(str, missing))}, which "
            f"{engines.get(engine).title} needs: it runs {runs} instead; tune with --mode joint"
        )

    def to_dict(self) -> dict[str, Any]:
        """The mapping that ``moeopt tune --json`` writes."""
        return {
            "shape": self.shape.to_dict(),
            "gpu": self.gpu,
            "kernel": self.info.kernel_title,
            "mode": self.mode,
            "space": self.space,
            "seed": self.seed,
            "recorded": self.info.recorded,
            "routing": self.info.routing_title,
            "triton": self.info.triton,
            "wall_s": round(self.wall_s, 3),
            "batch_sizes": {str(m): row.to_dict() for m, row in sorted(self.rows.items())},
            "counts": self.counts.to_dict(),
            "notes": list(self.notes),
            "timings": {k: round(v, 3) for k, v in self.timings.items()},
        }

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_dict`, whole or not at all.

        Raises:
            ExportError: The file cannot be written.
        """
        write_file(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat mapping per (batch size, role), for a table."""
        out = []
        for m, row in sorted(self.rows.items()):
            for role, part in (("up", row.up), ("down", row.down)):
                out.append(
                    {
                        "batch_size": m,
                        "role": role,
                        **part.config.to_dict(),
                        "us": part.us,
                        "default_us": part.default_us,
                        "roofline_us": part.roofline_us,
                        "measured": part.measured,
                    }
                )
        return out

    def to_frame(self) -> pandas.DataFrame:
        """:meth:`to_rows` as a pandas DataFrame.

        Raises:
            InvalidInputError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InvalidInputError("to_frame needs pandas: pip install pandas, or use to_rows()") from None
        return pandas.DataFrame(self.to_rows())
