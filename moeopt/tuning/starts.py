"""Starting points of a tune: recordings of other shapes, and configs that were good elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Cell
from moeopt.errors import MoeoptError
from moeopt.measure.base import Device
from moeopt.recordings.landscape import Landscape, load_landscapes
from moeopt.search.portfolio import engine_portfolio, greedy_portfolio, merge_portfolios
from moeopt.storage.store import StudyStore
from moeopt.tuning.load import load_result

log = logging.getLogger(__name__)


def find_landscapes(device: Device) -> tuple[Landscape, ...]:
    """The shipped recordings, but for those of the shape that is tuned.

    A replayed recording must not look itself up, and a GPU is tuned the same way as a recording of it.
    """
    return tuple(load_landscapes(exclude_shape=device.spec.shape))


def find_portfolio(
    device: Device,
    cells: Sequence[Cell],
    candidates: Sequence[LaunchConfig],
    landscapes: Sequence[Landscape],
    store: StudyStore,
) -> tuple[LaunchConfig, ...]:
    """Configs to try first, best first.

    They did well in other shapes' recordings, in the files of the engines installed here, or in the same
    database for other shapes on the same GPU.
    """
    sizes = sorted({cell.batch_size for cell in cells})
    recorded = greedy_portfolio(landscapes, device.spec.shape, cells, candidates)
    engines = () if device.spec.provenance.recorded else engine_portfolio(device.spec.shape, device.spec.gpu, sizes)
    return merge_portfolios([recorded, engines, neighbours(device, store)], candidates)


def neighbours(device: Device, store: StudyStore) -> tuple[LaunchConfig, ...]:
    """The winners of other shapes in the same database, on the same GPU and with the same kernel."""
    spec = device.spec
    found: dict[LaunchConfig, int] = {}
    for summary in store.keys():  # noqa: SIM118  (a method of ours, no dict)
        key = summary.key
        if key.shape == spec.shape or (key.gpu, key.provenance.kernel) != (spec.gpu.name, spec.provenance.kernel):
            continue
        try:
            rows = load_result(store, key).rows.values()
        except MoeoptError as error:  # one unreadable neighbour is no reason to tune nothing
            log.warning("a neighbour in the study database was passed over: %s", error)
            continue
        for row in rows:
            for config in (row.up.config, row.down.config):
                found[config] = found.get(config, 0) + 1
    return tuple(sorted(found, key=lambda config: (-found[config], config)))
