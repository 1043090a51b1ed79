"""Cost model of a launch: the formula, and on the architecture that was recorded a correction of its logarithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from moeopt.core.config import COLUMN, LaunchConfig, config_table
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.costmodel.formula import Array, launch_parts
from moeopt.costmodel.trees import launch_features, load_correction

# All recordings are of this compute capability, and what the formula misses there is of its tensor cores: on
# SM120 parts a linear correction moved upstream's tuned choices back; these trees were not tried there.
_CORRECTED: Final = 9
_MAX_CORRECTION: Final = 1.0  # in the log of time
_GROUP: Final = COLUMN["GROUP_SIZE_M"]  # which the formula does not know
_ROWS: Final = 2**17  # for which trees are walked at once
# Of an H200 with 16 cores, seconds: compiling both roles of a config (median, 15 processes), or finding them in
# Triton's cache; the start; checking a config; launches that time one; share of the shorter part that is not hidden.
_COMPILE_S: Final = 0.9
_CACHED_S: Final = 0.05
_START_S: Final = 10.0
_TRIAL_S: Final = 0.005
_LAUNCHES: Final = 40
_UNHIDDEN: Final = 0.2


def predict_us(
    shape: MoEShape,
    gpu: GpuSpec,
    role: Role,
    batch_size: int,
    configs: Sequence[LaunchConfig],
    *,
    corrected: bool = True,
) -> Array:
    """Predicted microseconds of one launch for each config, uniform routing.

    Args:
        shape: The layer.
        gpu: Its bandwidth, rates, multiprocessors, shared memory and registers are used.
        role: Which projection.
        batch_size: Tokens.
        configs: What to predict for; those that the GPU cannot run get a number too.
        corrected: By what was fitted on recordings of other shapes, on an architecture that was recorded.

    Returns:
        float64 [len(configs)], finite and positive.
    """
    rows = predict_table_us(shape, gpu, role, [batch_size], config_table(configs).astype(float), corrected=corrected)
    return np.asarray(rows[0])


def predict_table_us(
    shape: MoEShape, gpu: GpuSpec, role: Role, batch_sizes: Sequence[int], fields: Array, *, corrected: bool = True
) -> Array:
    """:func:`predict_us` for several batch sizes: float64 [batch sizes, configs].

    Args:
        shape: The layer.
        gpu: See there.
        role: Which projection.
        batch_sizes: Tokens.
        fields: Of :func:`moeopt.core.config.config_table`, as floats.
        corrected: See there.
    """
    rows, row = np.unique(fields, axis=0, return_inverse=True)
    tiles, tile = np.unique(np.delete(rows, _GROUP, axis=1), axis=0, return_inverse=True)
    row, tile, group = row.ravel(), tile.ravel(), np.log2(rows[:, _GROUP])
    corrected = corrected and gpu.compute_capability[0] == _CORRECTED
    us = np.empty((len(batch_sizes), len(rows)))
    # The trees are walked for several batch sizes at once: fewer calls, but memory for all their rows.
    at_once = max(1, _ROWS // max(len(rows), 1))
    for first in range(0, len(batch_sizes), at_once):
        some = batch_sizes[first : first + at_once]
        cells = [launch_parts(shape, gpu, role, m, np.insert(tiles, _GROUP, 1.0, axis=1)) for m in some]
        part: Array = np.array([parts.us[tile] for parts in cells])
        if corrected:
            features = [launch_features(shape, role, m, parts) for m, parts in zip(some, cells, strict=True)]
            of = (np.arange(len(cells))[:, None] * len(tiles) + tile).ravel()
            found = load_correction(shape)(np.concatenate(features), of, np.tile(group, len(cells)))
            part = part * np.exp(np.clip(found.reshape(part.shape), -_MAX_CORRECTION, _MAX_CORRECTION))
        us[first : first + at_once] = part
    return us[:, row]


def estimate_tune_seconds(
    shape: MoEShape, gpu: GpuSpec, batch_sizes: Sequence[int], trials: int, cores: int, *, compiled: bool = False
) -> float | None:
    """Roughly how long a split tune takes where nothing is known before.

    Compiling runs beside timing. Distinct configs grow with the root of the number of batch sizes, as they
    are shared among them (175 of 24 trials times 6 batch sizes, seen on recordings).

    Args:
        shape: The layer.
        gpu: Where.
        batch_sizes: M.
        trials: Configs timed per batch size and role.
        cores: Compile processes.
        compiled: Whether Triton's cache holds all binaries (``moeopt compile`` filled it): then it is timing alone.

    Returns:
        Seconds, or None where the GPU's bandwidth is not known.
    """
    if gpu.bandwidth_gbps <= 0:
        return None
    configs = min(7.3 * trials * (len(batch_sizes) / 6) ** 0.5, 2.0 * trials * len(batch_sizes))
    compiling = configs * (_CACHED_S if compiled else _COMPILE_S) / max(cores, 1)
    typical = LaunchConfig(64, 64, 128 if shape.spec.activation_bits == 8 else 64, 8, 4, 3)
    timing = 0.0
    for role in ROLES:
        for m in batch_sizes:
            us = float(predict_us(shape, gpu, role, m, [typical], corrected=False)[0])
            timing += trials * (_TRIAL_S + _LAUNCHES * us * 1e-6)
    return float(_START_S + max(compiling, timing) + _UNHIDDEN * min(compiling, timing))
