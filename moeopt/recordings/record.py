"""Recorder of a whole space: measures it and writes a recording."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TextIO

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES, Role
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Job, Measurement, Resources
from moeopt.errors import ExportError, RecordingError
from moeopt.files import json_lines, write_file
from moeopt.measure.base import Device
from moeopt.recordings.format import Header, RecordedConfig, RecordedRole, Recording

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
        roles = [(role, m) for role in ROLES for m in self.batch_sizes]
        defaults = dict.fromkeys(device.spec.default_config(role, m) for role, m in roles)
        configs += [config for config in device.spec.candidates(list(defaults)) if config not in set(configs)]
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
                    _append(file, self._header().encode())
                over = "over the GPU's limits; not compiled"
                for config in self.configs:
                    if config not in legal and config not in done:
                        _append(file, RecordedConfig(config=config, status="out_of_resources", error=over).encode())
                        done.add(config)
                todo = [config for config in self.configs if config not in done]
                for config, measurements in self._measure(todo):
                    _append(file, self._row(config, measurements).encode())
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

    def _row(self, config: LaunchConfig, measurements: Sequence[Measurement]) -> RecordedConfig:
        failure = next((m.failure for m in measurements if m.failure is not None), None)
        if failure is not None:
            return RecordedConfig(config=config, status="compile_error", reason=failure.reason, error=failure.message)
        resources = {role: m.resources[role] for m in reversed(measurements) for role in m.resources}
        compile_s = sum(one.compile_s for one in resources.values())
        up, down = (self._role(role, measurements, resources.get(role, Resources(0, 0, 0))) for role in ROLES)
        return RecordedConfig(config=config, status="ok", compile_s=round(compile_s, 3), up=up, down=down)

    @staticmethod
    def _role(role: Role, measurements: Sequence[Measurement], resources: Resources) -> RecordedRole:
        mine = sorted((m for m in measurements if m.job.cell.role == role), key=lambda m: m.job.cell)
        errors = [m.relative_error for m in mine if m.relative_error is not None]
        return RecordedRole(
            registers=resources.registers,
            spills=resources.spills,
            shared_bytes=resources.shared_bytes,
            relative_error=float(f"{max(errors):.4g}") if errors else None,
            us={m.job.cell.batch_size: tuple(round(us, 3) for us in m.us) for m in mine},
        )

    def _header(self) -> Header:
        spec, info = self.device.spec, self.device.spec.provenance
        versions = {"triton": info.triton, "torch": info.torch, "driver": info.driver, "moeopt": version("moeopt")}
        return Header(
            kernel=info.kernel_title,
            kernel_hash=info.kernel_hash,
            shape=spec.shape,
            gpu=spec.gpu,
            versions=versions,
            timing=TIMING_TEXT,
            slow_factor=self.slow_factor,
            routing=info.routing_title,
            roles=dict(ROLE_TEXT),
            space={key: list(values) for key, values in self.space.values.items()},
            sample=self.limit,
            batch_sizes=list(self.batch_sizes),
        )

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
        header, mine = json.loads(lines[0]), json.loads(json.dumps(self._header().encode()))
        differs = [key for key in mine if key != "timing" and header.get(key) != mine[key]]
        if differs:
            raise RecordingError(
                f"{self.part} was begun with another {differs[0]}: finish it with the same options, or delete it"
            )
        rows = [RecordedConfig.decode(json.loads(line)) for line in lines[1:]]
        for row in rows:
            for role, part in row.roles.items():
                for m, us in part.us.items():
                    cell = Cell(role, m)
                    self._best[cell] = min(statistics.median(us), self._best.get(cell, float("inf")))
        return {row.config for row in rows}

    def _finish(self) -> Path:
        """Turns the lines into a recording."""
        header, *lines = (json.loads(line) for line in self.part.read_text(encoding="utf-8").splitlines())
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
        lines.sort(key=lambda line: order[LaunchConfig.from_dict(line["config"])])
        write_file(self.out, json_lines([header, *lines]), check=Recording.load)
        self.part.unlink()
        return self.out


def _append(file: TextIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
    file.flush()


def _hash(config: LaunchConfig) -> str:
    return hashlib.sha256(str(config).encode()).hexdigest()
