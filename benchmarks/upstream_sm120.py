"""Where upstream's tuned choices for SM120 parts stand in the cost model's ranking.

    python benchmarks/upstream_sm120.py

The files are those of the published SGLang and vLLM wheels (fetched once by pip). For each batch size of a
file: the share of the legal grid that the model predicts to be faster than upstream's choice (0 % is the
model's own first), for the projections that the file is used for; and the same for the engine's default.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moeopt.costmodel import predict_us
from moeopt.kernels.defaults import engine_default
from moeopt.resources import illegal_reason
from moeopt.shape import ROLES
from moeopt.space import LaunchConfig, SearchSpace
from tests.sm120_files import ShippedFile, shipped_files


def places(file: ShippedFile) -> tuple[dict[int, float], dict[int, float]]:
    """Per batch size, the place of upstream's choice and of the engine's default in the predicted order."""
    legal = [c for c in SearchSpace.grid(file.shape).configs() if illegal_reason(c, file.shape, "up", file.gpu) is None]
    roles = ("down",) if file.role == "down" else ("up",) if _has_down(file) else ROLES

    def predicted(m: int, configs: list[LaunchConfig]) -> np.ndarray:
        return np.sum([predict_us(file.shape, file.gpu, role, m, configs) for role in roles], axis=0)

    shipped, default = {}, {}
    for m, config in sorted(file.configs.items()):
        us = predicted(m, legal)
        shipped[m] = float(np.mean(us < predicted(m, [config])[0]))
        default[m] = float(np.mean(us < predicted(m, [engine_default(file.engine, file.shape, m, file.gpu)])[0]))
    return shipped, default


def _has_down(file: ShippedFile) -> bool:
    return file.path.with_name(file.path.stem + "_down.json").exists()


def main() -> None:
    """See the top of the file."""
    every, defaults = [], []
    for file in shipped_files():
        shipped, default = places(file)
        every += list(shipped.values())
        defaults += list(default.values())
        print(f"{file.label}")
        print("   " + " ".join(f"{m}:{100 * place:.0f}%" for m, place in shipped.items()))
    for name, values in (("upstream's choices", every), ("the engine's defaults", defaults)):
        quarter, half, most = np.percentile(values, [25, 50, 90])
        print(
            f"{name}: {len(values)} cells; median place {half:.1%}, quartile {quarter:.1%}, "
            f"90th percentile {most:.1%}; "
            f"within the first 5 % in {np.mean(np.array(values) <= 0.05):.0%}, first 10 % in "
            f"{np.mean(np.array(values) <= 0.10):.0%}, first half in {np.mean(np.array(values) <= 0.5):.0%}"
        )


if __name__ == "__main__":
    main()
