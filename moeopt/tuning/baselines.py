"""Reference timings of a tune: the engine's defaults, a joint winner's two launches, rooflines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.trial import Cell, Job
from moeopt.measure.base import Device
from moeopt.storage.facts import Baseline, BaselineKind, CellFacts
from moeopt.storage.store import StudyKey, StudyStore
from moeopt.tuning.tally import Stopwatch


@dataclass
class Baselines:
    """Reference timings kept beside the trials, microseconds per (role, batch size).

    Attributes:
        default_us: The engine's default config.
        winner_us: In joint mode, the winner's time with each projection alone.
        roofline_us: Below which no kernel can go.
    """

    default_us: dict[Cell, float] = field(default_factory=dict)
    winner_us: dict[Cell, float] = field(default_factory=dict)
    roofline_us: dict[Cell, float] = field(default_factory=dict)


def study_cell(mode: str, cell: Cell) -> Cell:
    """The cell whose study holds the facts of a (role, batch size)."""
    return Cell("joint", cell.batch_size) if mode == "joint" else cell


def load_baselines(store: StudyStore, key: StudyKey, cells: Iterable[Cell]) -> Baselines:
    """The reference timings that a database holds for these cells."""
    out = Baselines()
    for cell in cells:
        facts = store.facts(key, cell)
        for role, us in facts.roofline_us.items():
            out.roofline_us[Cell(role, cell.batch_size)] = us
        for (kind, role), baseline in facts.baselines.items():
            if baseline.us is not None:
                into = out.default_us if kind == "default" else out.winner_us
                into[Cell(role, cell.batch_size)] = baseline.us
    return out


class BaselineTimer:
    """Times reference configs, each once: what comes back is kept beside the cell's trials."""

    def __init__(self, device: Device, store: StudyStore, key: StudyKey, watch: Stopwatch) -> None:
        """
        Args:
            device: What measures.
            store: Where the timings are kept.
            key: Whose cells they belong to.
            watch: Takes the time down.
        """
        self._device = device
        self._store = store
        self._key = key
        self._watch = watch
        self.found = Baselines()

    def time_defaults(self, batch_sizes: Sequence[int]) -> None:
        """Times the engine's default config, where the device can run it, and looks up the rooflines."""
        cells = [Cell(role, m) for m in batch_sizes for role in ROLES]
        defaults = {}
        for cell in cells:
            role = cell.roles[0]
            config = self._device.spec.default_config(role, cell.batch_size)
            if self._device.spec.candidates([config]):
                defaults[cell] = config
            roofline, moved = self._device.spec.roofline_us(cell), self._device.spec.launch_bytes(cell)
            if roofline is not None:
                self.found.roofline_us[cell] = roofline
                self._keep(cell, CellFacts(roofline_us={role: roofline}))
            if moved is not None:
                self._keep(cell, CellFacts(launch_bytes={role: round(moved)}))
        self.found.default_us = self._time("default", defaults)

    def time_winners(self, winners: Mapping[int, LaunchConfig]) -> None:
        """Times the winner of each batch size once more, each projection alone: in joint mode sums are measured."""
        configs = {Cell(role, m): config for m, config in winners.items() for role in ROLES}
        self.found.winner_us = self._time("winner", configs)

    def _time(self, kind: BaselineKind, configs: Mapping[Cell, LaunchConfig]) -> dict[Cell, float]:
        found: dict[Cell, float] = {}
        todo: list[Job] = []
        for cell, config in configs.items():
            kept = self._store.facts(self._key, self._home(cell)).baselines.get((kind, cell.roles[0]))
            if kept is None or kept.config != config:
                todo.append(Job(cell, config))
            elif kept.us is not None:
                found[cell] = kept.us
        for measurement in self._watch.measure(self._device, todo):
            cell = measurement.job.cell
            us = measurement.median_us if measurement.status == "ok" else None
            if us is not None:
                found[cell] = us
            baseline = Baseline(measurement.job.config, us)
            self._keep(cell, CellFacts(baselines={(kind, cell.roles[0]): baseline}))
        return found

    def _keep(self, cell: Cell, facts: CellFacts) -> None:
        with self._watch.time("storage"):
            self._store.add_facts(self._key, {self._home(cell): facts})

    def _home(self, cell: Cell) -> Cell:
        return study_cell(self._key.mode, cell)
