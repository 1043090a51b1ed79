"""Progress bar of a tune."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from moeopt.core.trial import Measurement


class TuneProgress:
    """A line on stderr: configs timed, pruned by kind, best so far, time left.

    Nothing is shown where stderr is not a terminal.
    """

    def __init__(self, total: int) -> None:
        """
        Args:
            total: The most (config, batch size, role) that can be timed.
        """
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("tuning", total=total, state="")
        self._best: dict[object, float] = {}

    def measured(self, measurement: Measurement, status: Mapping[str, int]) -> None:
        """Counts one measurement.

        Args:
            measurement: What came back.
            status: How many ended in each status in this run.
        """
        cell = measurement.job.cell
        if measurement.status == "ok":
            self._best[cell] = min(self._best.get(cell, float("inf")), measurement.median_us)
        best = f"{cell.role} M={cell.batch_size}: {self._best[cell]:.1f} µs" if cell in self._best else ""
        self._progress.update(
            self._task,
            advance=1,
            state=f"raced out {status['raced_out']}, rejected {status['rejected']}, failed {status['failed']}; {best}",
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
