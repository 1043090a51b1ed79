"""Ledger of a tune: what has been measured so far, and what is the best of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell, Job, Measurement


class Ledger:
    """All measurements of a tune, per cell. One per (cell, config): a fully timed one wins."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = tuple(cells)
        self._rows: dict[Cell, dict[LaunchConfig, Measurement]] = {cell: {} for cell in self.cells}
        self._incumbent: dict[Cell, Measurement] = {}
        # Per cell and BLOCK_SIZE_M: the fastest timed in full, and the fastest timed at all.
        self._full: dict[Cell, dict[int, _Ranked]] = {cell: {} for cell in self.cells}
        self._timed: dict[Cell, dict[int, _Ranked]] = {cell: {} for cell in self.cells}

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Takes measurements in; those of cells that are not tuned are dropped."""
        for m in measurements:
            rows = self._rows.get(m.job.cell)
            if rows is None:
                continue
            old = rows.get(m.job.config)
            if old is None or (old.status != "ok" and m.status in ("ok", "raced_out")):
                rows[m.job.config] = m
                self._keep_best(m)
                if old is not None and old.us:  # what is now timed in full may have been the best raced out
                    block = m.job.config.block_size_m
                    self._timed[m.job.cell].pop(block, None)
                    for other in rows.values():
                        if other.job.config.block_size_m == block:
                            self._keep_best(other)

    def _keep_best(self, m: Measurement) -> None:
        if not m.us or m.status not in ("ok", "raced_out"):
            return
        ranked, block = (_rank(m), m), m.job.config.block_size_m
        for best in (self._timed, self._full) if m.status == "ok" else (self._timed,):
            there = best[m.job.cell].get(block)
            if there is None or ranked[0] < there[0]:
                best[m.job.cell][block] = ranked
        if m.status == "ok":
            incumbent = self._incumbent.get(m.job.cell)
            if incumbent is None or ranked[0] < _rank(incumbent):
                self._incumbent[m.job.cell] = m

    def rows(self, cell: Cell) -> Mapping[LaunchConfig, Measurement]:
        """Everything known of a cell."""
        return self._rows[cell]

    def timed(self, cell: Cell) -> dict[LaunchConfig, float]:
        """µs of every config that was timed, in full or until it was raced out, in a fixed order."""
        return {c: m.median_us for c, m in sorted(self._rows[cell].items()) if m.us}

    def full(self, cell: Cell) -> dict[LaunchConfig, Measurement]:
        """The configs that were timed in full."""
        return {c: m for c, m in sorted(self._rows[cell].items()) if m.status == "ok" and m.us}

    def failed(self) -> set[LaunchConfig]:
        """Configs that did not compile, ran over limits or gave wrong numbers, in any cell."""
        return {c for rows in self._rows.values() for c, m in rows.items() if m.status in ("failed", "rejected")}

    def tried(self) -> set[LaunchConfig]:
        """Configs that were asked for in any cell: these have been compiled."""
        return {c for rows in self._rows.values() for c in rows}

    def incumbent(self, cell: Cell) -> Measurement | None:
        """The fastest fully timed config of a cell."""
        return self._incumbent.get(cell)

    def to_beat(self, job: Job) -> float | None:
        """How fast a job has to be to be of use, in µs; None while there is no sum to beat.

        Faster than its cell's best with the same BLOCK_SIZE_M, and than what the other role leaves of the batch
        size's best sum. Where the other role has not been timed with this BLOCK_SIZE_M, its best with any stands
        in, as it cannot get faster by being bound to one.
        """
        block, cells = job.config.block_size_m, [c for c in self.cells if c.batch_size == job.cell.batch_size]
        mine = self._full.get(job.cell, {})
        roles = [self._timed[c] for c in cells]
        shared = set.intersection(*map(set, roles)) if job.cell in cells else set()
        if not shared:
            return None
        total = min(sum(times[b][0][0] for times in roles) for b in shared)
        rest = sum(
            times[block][0][0] if block in times else min(times.values())[0][0]
            for cell, times in zip(cells, roles, strict=True)
            if cell != job.cell
        )
        return min(total - rest, mine[block][0][0] if block in mine else math.inf)

    def best_per_block(self, cell: Cell, *, raced_out: bool = False) -> dict[int, Measurement]:
        """For each BLOCK_SIZE_M, the fastest fully timed config of a cell, or the fastest timed at all."""
        best = (self._timed if raced_out else self._full)[cell]
        return {block: m for block, (_, m) in sorted(best.items())}

    def choose(self, *, raced_out: bool = False) -> dict[int, dict[str, Measurement]]:
        """The result: per batch size, what to export.

        Up and down share BLOCK_SIZE_M, because one alignment of tokens to experts serves both: of
        every BLOCK_SIZE_M that both have been timed with, the one with the smallest sum. Where only
        one role has been timed, that role stands alone; a batch size with nothing timed is left out.

        Args:
            raced_out: Where no BLOCK_SIZE_M is common to what was timed in full, look at what was raced out, too:
                for a result, a config that was timed for a launch or two is better than none for down.
        """
        out: dict[int, dict[str, Measurement]] = {}
        for batch_size in sorted({cell.batch_size for cell in self.cells}):
            best = {c.role: self.best_per_block(c) for c in self.cells if c.batch_size == batch_size}
            best = {role: blocks for role, blocks in best.items() if blocks}
            shared = _common(best)
            if raced_out and len(best) > 1 and not shared:
                every = {
                    c.role: self.best_per_block(c, raced_out=True) for c in self.cells if c.batch_size == batch_size
                }
                if _common(every):
                    best, shared = every, _common(every)
            if shared:
                block = min(sorted(shared), key=lambda b: sum(blocks[b].median_us for blocks in best.values()))
                out[batch_size] = {role: blocks[block] for role, blocks in best.items()}
            elif best:  # no BLOCK_SIZE_M in common: up alone, as an engine without a file for down does
                role = "up" if "up" in best else min(best)
                out[batch_size] = {role: min(best[role].values(), key=_rank)}
        return out


def _common(best: Mapping[Any, Mapping[int, Measurement]]) -> set[int]:
    """The BLOCK_SIZE_M that all roles have."""
    return set.intersection(*(set(blocks) for blocks in best.values())) if best else set()


_Ranked = tuple[tuple[float, LaunchConfig], Measurement]


def _rank(m: Measurement) -> tuple[float, LaunchConfig]:
    return (m.median_us, m.job.config)
