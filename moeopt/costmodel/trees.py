"""Trees that correct the formula on the architecture that was recorded, and what they look at.

Boosted regression trees, fitted on recordings with scikit-learn (``benchmarks/costmodel.py`` fits and judges them) and
walked here. There is one fit for every recorded layer that leaves its recordings out, so that nothing is predicted
from its own times.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

import numpy as np
from numpy.typing import NDArray

from moeopt.core.config import columns
from moeopt.core.shape import MoEShape, Role
from moeopt.costmodel.formula import Array, LaunchParts

FITTED: Final = "costmodel.npz"
EVERYTHING: Final = "all"  # the fit that leaves nothing out
FEATURES: Final = 22
DEPTH: Final = 6  # of a tree, at most


@dataclass(frozen=True, eq=False)
class Correction:
    """Boosted regression trees for log(measured / formula), up to a level of a cell.

    The nodes of all trees lie one after the other; a right child comes after its left one, a leaf is its own child.

    Attributes:
        roots: First node of each tree, int32 [trees].
        feature: What a node looks at, a column of :func:`launch_features`, or the one after them for log2 of
            GROUP_SIZE_M; int32 [nodes].
        threshold: Up to here the next is the left child; infinite in a leaf; float32 [nodes].
        left: int32 [nodes].
        value: What a leaf adds, float32 [nodes].
    """

    roots: NDArray[np.int32]
    feature: NDArray[np.int32]
    threshold: NDArray[np.float32]
    left: NDArray[np.int32]
    value: NDArray[np.float32]

    def __call__(self, features: Array, tile: NDArray[np.int64], group: Array) -> Array:
        """The sum over the trees, float64 [configs].

        Few trees look at GROUP_SIZE_M: the others are walked once for the configs that differ in it alone.

        Args:
            features: Of :func:`launch_features`, [tiles, features].
            tile: Which of these each config has, [configs].
            group: log2 of GROUP_SIZE_M, [configs].
        """
        by_group = self._by_group()
        whole = np.column_stack([features[tile], group])
        return self._walk(features, self.roots[~by_group])[tile] + self._walk(whole, self.roots[by_group])

    def _by_group(self) -> NDArray[np.bool_]:
        """Which trees look at GROUP_SIZE_M."""
        asks = np.isfinite(self.threshold) & (self.feature == FEATURES)
        return np.add.reduceat(asks, self.roots) > 0

    def _walk(self, features: Array, roots: NDArray[np.int32]) -> Array:
        columns = np.ascontiguousarray(features.T, dtype=np.float32)
        flat, rows = columns.ravel(), np.arange(len(features), dtype=np.int32)
        start = self.feature * np.int32(len(features))
        out = np.zeros(len(features))
        for root in roots:
            node = np.full(len(features), root, dtype=np.int32)
            for _ in range(DEPTH):
                asked = flat.take(start.take(node) + rows)
                node = self.left.take(node) + (asked > self.threshold.take(node))
            out += self.value.take(node)
        return out


@functools.lru_cache(maxsize=4)
def load_correction(without: MoEShape | None = None) -> Correction:
    """The shipped correction.

    Args:
        without: Fitted without any recording of this shape, on whatever GPU and with whatever kernel.
    """
    with np.load(str(resources.files("moeopt.costmodel") / FITTED)) as arrays:
        name = EVERYTHING if without is None or f"{without.slug()}/sizes" not in arrays else without.slug()
        return unpack_correction({key: arrays[f"{name}/{key}"] for key in ("sizes", "nodes", "numbers")})


def unpack_correction(packed: Mapping[str, NDArray[np.generic]]) -> Correction:
    """A correction from what :func:`pack_correction` made of it."""
    sizes = packed["sizes"].astype(np.int32)
    roots = np.cumsum(sizes, dtype=np.int32) - sizes
    feature, left = packed["nodes"].astype(np.int32)
    threshold, value = packed["numbers"].astype(np.float32)
    arrays = (roots, feature, threshold, left + np.repeat(roots, sizes), value)
    for array in arrays:
        array.flags.writeable = False  # one is kept for all who ask
    return Correction(*arrays)


def pack_correction(correction: Correction) -> dict[str, NDArray[np.generic]]:
    """Arrays for a file: nodes per tree; feature and left child within the tree; threshold and value."""
    sizes = np.diff(np.append(correction.roots, len(correction.feature)))
    left = correction.left - np.repeat(correction.roots, sizes)
    return {
        "sizes": sizes.astype(np.uint8),
        "nodes": np.stack([correction.feature, left]).astype(np.uint8),
        "numbers": np.stack([correction.threshold, correction.value]),
    }


def launch_features(shape: MoEShape, role: Role, batch_size: int, parts: LaunchParts) -> Array:
    """What a correction looks at, but for GROUP_SIZE_M: float64 [number of configs, FEATURES].

    No length of a weight's side is among them, so that it holds for layers larger than the recorded ones.

    Args:
        shape: The layer.
        role: Which projection.
        batch_size: Tokens.
        parts: Of :func:`launch_parts`.
    """
    bm, bn, warps, stages = columns(parts.fields, "BLOCK_SIZE_M", "BLOCK_SIZE_N", "num_warps", "num_stages")
    one = np.ones_like(bm)
    tokens = batch_size * shape.top_k / (shape.num_experts * shape.ep_size)
    return np.stack(
        [
            np.log2(bm), np.log2(bn), np.log2(parts.step_bytes), np.log2(warps), stages,
            np.log2(parts.occupancy), np.log2(parts.waves), np.log2(parts.valid_rows), np.log2(parts.in_flight),
            np.log2(parts.registers), np.minimum(parts.spilled, 2.0), parts.wgmma * one, parts.swapped * one,
            parts.dram_us / (parts.dram_us + parts.body_us), np.log2(bm / parts.valid_rows), one * np.log2(tokens),
            one * bool(shape.block_shape), one * bool(shape.group_size), one * (role == "up"),
            np.log2(bm * bn / warps), np.log2(parts.steps), one * bool(shape.per_channel),
        ],
        axis=1,
    )  # fmt: skip
