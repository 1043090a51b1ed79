"""Measures a whole space and writes it down as a recording (``moe-landscape/1``)."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement
from moeopt.errors import ExportError, RecordingError
from moeopt.files import json_lines, write_file
from moeopt.measure.base import Device
from moeopt.recordings.format import FORMAT, Recording

log = logging.getLogger(__name__)

ROLE_TEXT: Final = {
    "up": "A[M,K] x W1[E,2N,K] -> [M*top_k,2N]",
    "down": "A[M*top_k,N] x W2[E,K,N] -> [M*top_k,K], routed weight applied",
}
TIMING_TEXT: Final = (
    "each value: microseconds per launch of one replay of a CUDA graph of launches over different routings; "
    "list = successive replays after one warm-up; one value where the first was over slow_factor times the best"
)


class Recorder:
    """Times every config of a space for every batch size and role, one after the other.

    What is done is kept line by line in ``<out>.part``: a recorder that is started again with the
    same output goes on from there.
    """

    def __init__(
        self,
        device: Device,
        space: SearchSpace,
        batch_sizes: Sequence[int],
        out: Path,
        *,
        slow_factor: float = 3.0,
        limit: int | None = None,
    ) -> None:
        """
        Args:
            device: What measures.
            space: What is measured.
            batch_sizes: M.
            out: The recording, ending in ``.jsonl.gz``.
            slow_factor: A config this many times slower than the best so far is timed by one replay.
            limit: Record only this many of the space's configs, picked evenly by hash; None for all.
        """
        self.device = device
        self.space = space
        self.batch_sizes = tuple(batch_sizes)
        self.out = out
        self.part = out.with_name(out.name + ".part")
        self.slow_factor = slow_factor
        configs = list(space.configs())
        if limit is not None and limit < len(configs):
            # An even sample that does not change with the limit: a larger one holds a smaller one.
            configs = sorted(configs, key=_hash)[:limit]
        self.configs = configs
        self.limit = limit
        self._best: dict[Cell, float] = {}

    def run(self, on_config: Callable[[int, int], None] | None = None) -> Path:
        """Records.

        Args:
            on_config: Called with (configs done, configs in all) after each config.

        Raises:
            ExportError: The output cannot be written.
            RecordingError: ``<out>.part`` is of another shape, GPU, kernel or space.
        """
        legal = set(self.device.spec.candidates(self.configs))
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            done = self._read_part()
            with self.part.open("a", encoding="utf-8") as file:
                if not self.part.stat().st_size:
                    _write_line(file, self._identity())
                for config in self.configs:
                    if config not in legal and config not in done:
                        row = {
                            "config": config.to_dict(),
                            "status": "out_of_resources",
                            "error": "over the GPU's limits; not compiled",
                            "compile_s": None,
                        }
                        _write_line(file, row)
                        done.add(config)
                todo = [config for config in self.configs if config not in done]
                for config, measurements in self._measure(todo):
                    _write_line(file, self._row(config, measurements))
                    done.add(config)
                    if on_config is not None:
                        on_config(len(done), len(self.configs))
            return self._finish()
        except OSError as error:
            raise ExportError(f"{self.out} cannot be written: {error.strerror or error}; give another path") from None

    def _measure(self, configs: Sequence[LaunchConfig]) -> Iterable[tuple[LaunchConfig, list[Measurement]]]:
        """Each config with its measurements for all cells, once all of them are there."""
        cells = [Cell(role, m) for role in ROLES for m in self.batch_sizes]
        jobs = [Job(cell, config) for config in configs for cell in cells]
        waiting: dict[LaunchConfig, list[Measurement]] = defaultdict(list)
        with closing(self.device.measure(jobs, self._race)) as results:
            for measurement in results:
                config, cell = measurement.job.config, measurement.job.cell
                if measurement.us:
                    us = measurement.median_us
                    self._best[cell] = min(us, self._best.get(cell, us))
                waiting[config].append(measurement)
                if len(waiting[config]) == len(cells):
                    yield config, waiting.pop(config)

    def _race(self, job: Job, rounds: Sequence[float]) -> bool:
        best = self._best.get(job.cell)
        return best is not None and statistics.median(rounds) > self.slow_factor * best

    def _row(self, config: LaunchConfig, measurements: Sequence[Measurement]) -> dict[str, Any]:
        row: dict[str, Any] = {"config": config.to_dict(), "status": "ok", "compile_s": None}
        failure = next((m.failure for m in measurements if m.failure is not None), None)
        if failure is not None:
            return {**row, "status": "compile_error", "reason": failure.reason, "error": failure.message}
        compile_s = 0.0
        for role in ROLES:
            mine = [m for m in measurements if m.job.cell.role == role]
            resources = next((m.resources[role] for m in mine if role in m.resources), None)
            errors = [m.relative_error for m in mine if m.relative_error is not None]
            compile_s += resources.compile_s if resources else 0.0
            row[role] = {
                "registers": resources.registers if resources else 0,
                "spills": resources.spills if resources else 0,
                "shared_bytes": resources.shared_bytes if resources else 0,
                "relative_error": float(f"{max(errors):.4g}") if errors else None,
                "us": {
                    str(m.job.cell.batch_size): [round(us, 3) for us in m.us]
                    for m in sorted(mine, key=lambda m: m.job.cell)
                },
            }
        row["compile_s"] = round(compile_s, 3)
        return row

    def _identity(self) -> dict[str, Any]:
        spec, info = self.device.spec, self.device.spec.provenance
        gpu, ours = spec.gpu, version("moeopt")
        return {
            "format": FORMAT,
            "kernel": info.kernel_title,
            "kernel_hash": info.kernel_hash,
            "shape": spec.shape.to_dict(),
            "gpu": gpu.to_dict(),
            "versions": {
                "triton": info.triton,
                "torch": info.torch,
                "driver": info.driver,
                "moeopt": ours,
            },
            "timing": TIMING_TEXT,
            "slow_factor": self.slow_factor,
            "routing": info.routing_title,
            "roles": ROLE_TEXT,
            "space": {key: list(values) for key, values in self.space.values.items()},
            "sample": self.limit,
            "batch_sizes": list(self.batch_sizes),
        }

    def _read_part(self) -> set[LaunchConfig]:
        """Configs that an earlier, unfinished recording holds; a torn last line is cut off."""
        if not self.part.exists():
            return set()
        data = self.part.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            with self.part.open("r+b") as file:
                file.truncate(len(whole))
        lines = whole.decode("utf-8").splitlines()
        if not lines:
            return set()
        header, mine = json.loads(lines[0]), self._identity()
        differs = [key for key in mine if key != "timing" and header.get(key) != json.loads(json.dumps(mine[key]))]
        if differs:
            raise RecordingError(
                f"{self.part} was begun with another {differs[0]}: finish it with the same options, or delete it"
            )
        done = set()
        for line in lines[1:]:
            row = json.loads(line)
            config = LaunchConfig.from_dict(row["config"])
            done.add(config)
            for role in ROLES:
                for m, us in row.get(role, {}).get("us", {}).items():
                    cell = Cell(role, int(m))
                    self._best[cell] = min(statistics.median(us), self._best.get(cell, float("inf")))
        return done

    def _finish(self) -> Path:
        """Turns the lines into a recording, whole or not at all."""
        lines = self.part.read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0])
        header["complete"] = self.limit is None
        header["roofline_us"] = {
            role: {
                str(m): round(us, 3)
                for m in self.batch_sizes
                for us in (self.device.spec.roofline_us(Cell(role, m)),)
                if us is not None
            }
            for role in ROLES
        }
        order = {config: i for i, config in enumerate(self.configs)}
        rows = sorted(map(json.loads, lines[1:]), key=lambda row: order[LaunchConfig.from_dict(row["config"])])
        write_file(self.out, json_lines([header, *rows]), check=Recording.load)
        self.part.unlink()
        return self.out


def _write_line(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, separators=(",", ":")) + "\n")
    file.flush()


def _hash(config: LaunchConfig) -> str:
    return hashlib.sha256(str(config).encode()).hexdigest()
