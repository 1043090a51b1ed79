"""Assembly of a result from measurements, of a run that just ended or of a database that is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import Role
from moeopt.core.trial import Cell, Measurement, Mode
from moeopt.search.ledger import Ledger
from moeopt.tuning.baselines import Baselines
from moeopt.tuning.outcome import BatchResult, RoleResult


def assemble(
    mode: Mode, ledger: Ledger, chosen: Mapping[int, Mapping[Any, Measurement]], baselines: Baselines
) -> dict[int, BatchResult]:
    """Rows of a result, for every batch size whose both projections have a config.

    Args:
        mode: Of the tune.
        ledger: All measurements.
        chosen: Per batch size and role the best.
        baselines: Defaults and rooflines.
    """
    rows = {}
    for m, parts in sorted(chosen.items()):
        if mode == "joint" and "joint" in parts:
            rows[m] = _joint_row(ledger, m, parts["joint"], baselines)
        elif "up" in parts and "down" in parts:
            joint = best_joint(ledger, m)
            rows[m] = BatchResult(
                batch_size=m,
                up=_result("up", m, parts["up"].job.config, parts["up"].median_us, ledger, Cell("up", m), baselines),
                down=_result(
                    "down", m, parts["down"].job.config, parts["down"].median_us, ledger, Cell("down", m), baselines
                ),
                joint_config=joint[1] if joint else None,
                joint_us=joint[0] if joint else None,
            )
    return rows


def best_joint(ledger: Ledger, m: int) -> tuple[float, LaunchConfig] | None:
    """The best config among those timed in full for both projections, as (µs of both, config)."""
    up, down = ledger.full(Cell("up", m)), ledger.full(Cell("down", m))
    return min(((up[c].median_us + down[c].median_us, c) for c in up if c in down), default=None)


def _joint_row(ledger: Ledger, m: int, winner: Measurement, baselines: Baselines) -> BatchResult:
    """The sum was measured; how it falls to up and down is known where each was timed alone, too."""
    config, total, cell = winner.job.config, winner.median_us, Cell("joint", m)
    up, down = baselines.winner_us.get(Cell("up", m)), baselines.winner_us.get(Cell("down", m))
    share = up / (up + down) if up and down else 0.5
    return BatchResult(
        batch_size=m,
        up=_result("up", m, config, total * share, ledger, cell, baselines),
        down=_result("down", m, config, total * (1 - share), ledger, cell, baselines),
        joint_config=config,
        joint_us=total,
    )


def _result(
    role: Role, m: int, config: LaunchConfig, us: float, ledger: Ledger, counted: Cell, baselines: Baselines
) -> RoleResult:
    cell = Cell(role, m)
    return RoleResult(
        config=config,
        us=us,
        measured=len(ledger.timed(counted)),
        default_us=baselines.default_us.get(cell),
        roofline_us=baselines.roofline_us.get(cell),
    )
