"""Finalists of a tune: configs that are nearly as good, timed once more, in turn.

A single window for each config misorders those that are within a few percent of each other: clocks
and neighbours change between windows. The finalists of a cell are therefore timed again in several
passes over all of them, and chosen by the median over the passes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from moeopt.core.trial import Job, never_stop
from moeopt.measure.base import Device
from moeopt.search.ledger import Ledger

# Within this share of the best, a config is a finalist.
MARGIN: Final = 0.02
# At most so many finalists of one (cell, BLOCK_SIZE_M), and passes over all of them.
MAX_PER_BLOCK: Final = 3
PASSES: Final = 3


def find_finalists(ledger: Ledger) -> list[Job]:
    """The configs that could be the best of their cell, where there is more than one.

    In split mode up and down share BLOCK_SIZE_M, so a config counts with the best of the other
    projection that has the same.
    """
    jobs = []
    for m in sorted({cell.batch_size for cell in ledger.cells}):
        cells = [cell for cell in ledger.cells if cell.batch_size == m]
        best = {cell: ledger.best_per_block(cell) for cell in cells}
        shared = set.intersection(*(set(blocks) for blocks in best.values()))
        if not shared:
            continue
        sums = {block: sum(best[cell][block].median_us for cell in cells) for block in shared}
        limit = min(sums.values()) * (1 + MARGIN)
        mine = []
        for cell in cells:
            for block in sorted(shared):
                # What this projection may take at most, the other one at its best.
                left = limit - (sums[block] - best[cell][block].median_us)
                close = [
                    measurement
                    for config, measurement in ledger.full(cell).items()
                    if config.block_size_m == block and measurement.median_us <= left
                ]
                close.sort(key=lambda measurement: (measurement.median_us, measurement.job.config))
                mine += [measurement.job for measurement in close[:MAX_PER_BLOCK]]
        if len(mine) > len(cells):
            jobs += mine
    return jobs


def time_finalists(device: Device, jobs: Sequence[Job]) -> dict[Job, tuple[float, ...]]:
    """Times each finalist in :data:`PASSES` passes.

    Returns:
        Per finalist its median µs in each pass; one that failed in a pass is left out.
    """
    passes: dict[Job, list[float]] = {job: [] for job in jobs}
    for _ in range(PASSES):
        with closing(device.measure(jobs, never_stop)) as results:
            for measurement in results:
                if measurement.status == "ok" and measurement.us:
                    passes[measurement.job].append(measurement.median_us)
    return {job: tuple(us) for job, us in passes.items() if len(us) == PASSES}


def with_finals(ledger: Ledger, finals: Mapping[Job, Sequence[float]]) -> Ledger:
    """The same measurements, with the finalists' times from the passes.

    The others of a cell are scaled by what the finalists' times have changed on the whole: that is the
    GPU's clock, not the configs.
    """
    out = Ledger(ledger.cells)
    for cell in ledger.cells:
        rows = ledger.rows(cell)
        mine = {job.config: us for job, us in finals.items() if job.cell == cell and job.config in rows}
        before = [rows[config].median_us for config in mine]
        # A factor between the two windows that all share is the GPU's clock: the others get it, too.
        shift = (
            statistics.median([statistics.median(us) for us in mine.values()]) / statistics.median(before)
            if mine
            else 1.0
        )
        for config, measurement in rows.items():
            us: Iterable[float] = mine.get(config, [value * shift for value in measurement.us])
            out.add([replace(measurement, us=tuple(us))])
    return out
