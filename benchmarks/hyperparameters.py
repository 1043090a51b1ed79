"""Hyperparameters of the surrogate that make recordings most likely: the medians over recordings.

    python -m benchmarks.hyperparameters [--alone] [RECORDING ...]

Of each recording the surrogate sees what a search of 24 configs per cell timed (at most 200 of these), and the
hyperparameters are moved from where they are to the greatest marginal likelihood. ``moeopt/search/surrogate.py`` holds
rounded medians: WITH_RECORDINGS, and with ``--alone``, where nothing is learned from other recordings, ALONE.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import minimize

from benchmarks.search import RECORDINGS, Judge
from moeopt.core.config import config_table
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import load_landscapes
from moeopt.search.features import cell_features, config_features, squash
from moeopt.search.pool_search import PoolSearch
from moeopt.search.prior import make_prior
from moeopt.search.surrogate import ALONE, WITH_RECORDINGS, CellKernel, Hyperparameters, Surrogate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST = 200
KERNELS = ("shared", "local", "own", "mean", "basis")
SPREAD = 1.0  # standard deviation of each number's prior, in its log or logit


def pack(hyper: Hyperparameters) -> Floats:
    """Logs of amplitudes and lengths, logits of correlations."""
    out = [np.log(hyper.noise), *np.log(hyper.lengths)]
    for name in KERNELS:
        kernel: CellKernel = getattr(hyper, name)
        out += [np.log(kernel.amplitude), np.log(kernel.length)]
        if kernel.between_roles < 1.0:
            out.append(np.log(kernel.between_roles / (1 - kernel.between_roles)))
    return np.array(out)


def unpack(theta: Floats, like: Hyperparameters) -> Hyperparameters:
    """The inverse of :func:`pack`."""
    values = iter(theta.tolist())
    noise = float(np.exp(next(values)))
    lengths = tuple(float(np.exp(next(values))) for _ in like.lengths)
    kernels = {}
    for name in KERNELS:
        amplitude, length = float(np.exp(next(values))), float(np.exp(next(values)))
        roles = 1.0 if getattr(like, name).between_roles == 1.0 else float(1 / (1 + np.exp(-next(values))))
        kernels[name] = CellKernel(amplitude, length, roles)
    return Hyperparameters(noise=noise, lengths=lengths, **kernels)


def fit(path: Path, alone: bool) -> Hyperparameters:
    """The most likely hyperparameters of one recording."""
    judge = Judge(Recording.load(path))
    landscapes = () if alone else load_landscapes(RECORDINGS, exclude_shape=judge.recording.shape)
    search = PoolSearch(judge.problem(24, 0, landscapes))
    while jobs := search.ask():
        search.tell(list(judge.device.measure(jobs, search.race)))
    table = config_table(judge.candidates)
    prior = make_prior(judge.recording.shape, judge.recording.gpu, judge.cells, table, landscapes)
    index = {config: i for i, config in enumerate(judge.candidates)}
    rows = [(index[c], i, us) for i, cell in enumerate(judge.cells) for c, us in search.ledger.timed(cell).items()]
    some = np.random.default_rng(0).permutation(len(rows))[:MOST]
    config, cell = (np.array([rows[i][column] for i in some], dtype=np.int64) for column in (0, 1))
    best = np.array([min(search.ledger.timed(c).values()) for c in judge.cells])
    value = squash(np.log(np.array([rows[i][2] for i in some]) / best[cell])) - prior.mean[cell, config]
    counts = np.maximum(np.bincount(cell, minlength=len(best)), 1)
    value -= (np.bincount(cell, value, len(best)) / counts)[cell]
    distinct, place = np.unique(config, return_inverse=True)
    features, mean, basis = config_features(table[distinct]), prior.mean[:, distinct], prior.basis(distinct)
    start = ALONE if alone else WITH_RECORDINGS
    origin = pack(start)

    def loss(theta: Floats) -> float:
        model = Surrogate(features, cell_features(judge.cells), mean, basis, unpack(theta, start))
        try:
            model.condition(place, cell, value)
        except np.linalg.LinAlgError:
            return 1e9
        pull = (theta - origin) / SPREAD
        return 0.5 * float(pull @ pull) - model.log_likelihood

    found = minimize(loss, origin, method="L-BFGS-B", options={"maxiter": 30})
    return unpack(found.x, start)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path, default=sorted(RECORDINGS.glob("*.jsonl.gz")))
    parser.add_argument("--alone", action="store_true", help="nothing is learned from other recordings")
    options = parser.parse_args(arguments)
    start = ALONE if options.alone else WITH_RECORDINGS
    found = [pack(fit(path, options.alone)) for path in options.recordings]
    print(f"medians over {len(found)} recordings: {unpack(np.median(found, axis=0), start)}")
    print(f"in the package: {start}")


if __name__ == "__main__":
    main()
