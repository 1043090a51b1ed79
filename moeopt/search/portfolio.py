"""Short lists of configs that were good elsewhere, to be tried first.

Three sources: recordings of other shapes and GPUs, the config files of engines that are installed, and
what was tuned before in the same storage. None may know the recording that is replayed: callers leave
its shape out (``load_landscapes(exclude_shape=...)``).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GPUS, GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell
from moeopt.errors import InvalidInputError
from moeopt.export.install import bundled_directory
from moeopt.export.names import ConfigName, device_relatives, nearest_key
from moeopt.export.read import read_config_file
from moeopt.recordings.landscape import Landscape
from moeopt.search.features import squash

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

_FILES: Final = 4  # config files of an engine that are read


def greedy_portfolio(
    landscapes: Sequence[Landscape],
    shape: MoEShape,
    cells: Sequence[Cell],
    candidates: Sequence[LaunchConfig],
    size: int = 16,
) -> tuple[LaunchConfig, ...]:
    """Configs that together come close to the best of recorded cells like those to be tuned.

    Each next one is that which brings the mean over the recorded cells down most, every cell
    weighted by how much it is like one that is to be tuned.

    Args:
        landscapes: Recordings of other shapes.
        shape: What is to be tuned.
        cells: For which roles and batch sizes.
        candidates: The legal configs.
        size: How many, at most.
    """
    wanted = set(candidates)
    columns: dict[LaunchConfig, int] = {}
    blocks: list[tuple[NDArray[np.float64], NDArray[np.float64], list[int]]] = []
    for recorded in landscapes:
        landscape = recorded.joint() if cells[0].role == "joint" else recorded
        weight = similarity(shape, cells, landscape).max(axis=0)
        usable = [(j, c) for j, c in enumerate(landscape.configs) if c in wanted]
        excess = np.log(landscape.us, dtype=np.float64)
        excess = squash(excess - np.nanmin(excess, axis=1, keepdims=True))[:, [j for j, _ in usable]]
        blocks.append(
            (weight, np.nan_to_num(excess, nan=2.0), [columns.setdefault(c, len(columns)) for _, c in usable])
        )
    if not columns:
        return ()
    table = np.full((sum(len(w) for w, _, _ in blocks), len(columns)), 2.0)
    start = 0
    for weight, excess, at in blocks:
        table[start : start + len(weight), at] = excess
        start += len(weight)
    weights = np.concatenate([w for w, _, _ in blocks])
    configs = list(columns)
    best = np.full(len(table), 2.0)
    chosen: list[LaunchConfig] = []
    for _ in range(min(size, len(configs))):
        totals = weights @ np.minimum(best[:, None], table)
        if totals.min() >= weights @ best - 1e-9:
            break
        pick = int(np.argmin(totals))
        best = np.minimum(best, table[:, pick])
        chosen.append(configs[pick])
    return tuple(chosen)


def similarity(shape: MoEShape, cells: Sequence[Cell], other: Landscape) -> NDArray[np.float64]:
    """How much a recorded cell says of a tuned one of the same role, by tokens per expert; float64 [cells, recorded].

    A Gaussian of the doublings between them: 1 for as many tokens per expert, 0.6 for half or twice as many.
    """
    out = np.zeros((len(cells), len(other.cells)))
    for i, a in enumerate(cells):
        for j, b in enumerate(other.cells):
            if a.role == b.role:
                doublings = math.log2(_tokens_per_expert(shape, a) / _tokens_per_expert(other.shape, b))
                out[i, j] = math.exp(-(doublings**2) / 2)
    return out


def _tokens_per_expert(shape: MoEShape, cell: Cell) -> float:
    return cell.batch_size * shape.top_k / (shape.num_experts * shape.ep_size)


def engine_portfolio(
    shape: MoEShape, gpu: GpuSpec, batch_sizes: Sequence[int], directories: Iterable[Path] | None = None
) -> tuple[LaunchConfig, ...]:
    """Configs of the engines' own files for the nearest shapes and GPUs: nearest first, of a file the most used first.

    A file of the same GPU comes before one of a GPU of the same compute capability, that before any
    other; files of another dtype are not read.

    Args:
        shape: What is to be tuned.
        gpu: Where.
        batch_sizes: For which M: of each file the entries that an engine would use.
        directories: Where to look, with all below; by default what the installed engines ship.
    """
    if directories is None:
        directories = [d for engine in engines.names() if (d := bundled_directory(engine)) is not None]
    found: list[tuple[tuple[float, ...], str, Path]] = []
    for directory in directories:
        for path in sorted({path for spec in engines.every() for path in directory.rglob(spec.names.pattern)}):
            try:
                name = ConfigName.parse(path.name)
                asked = ConfigName.of(name.engine, shape, gpu.name)
            except InvalidInputError:
                continue
            if (name.dtype, name.block_shape, name.per_channel) == (asked.dtype, asked.block_shape, asked.per_channel):
                found.append(((_gpu_distance(name.device, asked.device, gpu), _distance(name, asked)), path.name, path))
    out: dict[LaunchConfig, None] = {}
    for _, _, path in sorted(found)[:_FILES]:
        try:
            configs = read_config_file(path).configs()
        except InvalidInputError as error:
            log.info("%s is passed over: %s", path.name, error)
            continue
        if configs:
            counts = Counter(configs[nearest_key(list(configs), m)] for m in batch_sizes)
            out.update(dict.fromkeys(config for config, _ in counts.most_common()))
    return tuple(out)


def _gpu_distance(device: str, asked: str, gpu: GpuSpec) -> float:
    if device == asked:
        return 0.0
    if device in device_relatives(asked):
        return 1.0
    there = next((g for g in GPUS.values() if g.name.replace(" ", "_") == device), None)
    return 2.0 if there is not None and there.sm // 10 == gpu.sm // 10 else 3.0


def _distance(name: ConfigName, asked: ConfigName) -> float:
    return abs(math.log2(name.num_experts / asked.num_experts)) + abs(
        math.log2(name.intermediate_size / asked.intermediate_size)
    )


def merge_portfolios(
    lists: Iterable[Sequence[LaunchConfig]], candidates: Sequence[LaunchConfig], size: int = 24
) -> tuple[LaunchConfig, ...]:
    """One list of several, each best first: takes turns, drops what is not a candidate or there already."""
    wanted = set(candidates)
    queues = [[c for c in entries if c in wanted] for entries in lists]
    longest = max(map(len, queues), default=0)
    turns = (queue[i] for i in range(longest) for queue in queues if i < len(queue))
    return tuple(dict.fromkeys(turns))[:size]
