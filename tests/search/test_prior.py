"""What is expected before anything is timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr

from moeopt.core.config import LaunchConfig, config_table, configs_of
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import Landscape
from moeopt.search.features import config_features, squash
from moeopt.search.prior import expected_us, make_prior
from tests.search.replay import RECORDINGS


@pytest.fixture(scope="module")
def bf16() -> Landscape:
    return Landscape.from_recording(Recording.load(RECORDINGS / "h200-E256-top8-K3072-N256-bf16.jsonl.gz"))


@pytest.fixture(scope="module")
def fp8() -> Landscape:
    return Landscape.from_recording(Recording.load(RECORDINGS / "h200-E256-top8-K6144-N256-fp8_w8a8.jsonl.gz"))


def ranks(prior: np.ndarray, landscape: Landscape) -> list[float]:
    out = []
    for expected, us in zip(prior, landscape.us, strict=True):
        ok = np.isfinite(us)
        out.append(float(spearmanr(expected[ok], us[ok])[0]))
    return out


def test_the_formula_ranks_configs_it_never_saw(bf16: Landscape, fp8: Landscape) -> None:
    for landscape in (bf16, fp8):
        us = expected_us(landscape.shape, landscape.gpu, landscape.cells, landscape.table)
        assert us.shape == landscape.us.shape
        assert np.isfinite(us).all()
        assert (us > 0).all()
        found = ranks(us, landscape)
        assert np.mean(found) > 0.75
        assert min(found) > 0.5


def test_the_shipped_fit_of_other_shapes_makes_better_ranks(bf16: Landscape, fp8: Landscape) -> None:
    for landscape, other in ((bf16, fp8), (fp8, bf16)):
        arguments = (landscape.shape, landscape.gpu, landscape.cells, landscape.table)
        alone, taught = make_prior(*arguments), make_prior(*arguments, (other,))
        assert alone.mean.shape == taught.mean.shape == landscape.us.shape
        good = landscape.us < 1.5 * np.nanmin(landscape.us, axis=1, keepdims=True)
        rises = 0
        for i in range(len(landscape.cells)):
            before, after = (spearmanr(p.mean[i][good[i]], landscape.us[i][good[i]])[0] for p in (alone, taught))
            rises += after > before
        assert rises >= 8, "of 12 cells"


def test_candidates_at_the_same_places_are_looked_at_once(
    bf16: Landscape, fp8: Landscape, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = config_table(SearchSpace.wide(bf16.shape, extras=("maxnreg",)).configs()[::23])
    assert 500 < len(wide) < 4096
    arguments = (bf16.shape, bf16.gpu, bf16.cells, wide, (fp8,))
    plain = make_prior(*arguments)
    monkeypatch.setattr("moeopt.search.prior._MANY", 100)
    once = make_prior(*arguments)
    assert once.residuals is not None and len(once.residuals.places[0]) < len(wide)
    np.testing.assert_allclose(once.mean, plain.mean, atol=1e-12)
    some = np.arange(0, len(wide), 5)
    np.testing.assert_allclose(*(b @ b.T for b in (once.basis(some), plain.basis(some))), atol=0.02)


def test_a_recording_that_has_no_cell_of_this_kind_says_nothing(bf16: Landscape, fp8: Landscape) -> None:
    ups = [i for i, cell in enumerate(fp8.cells) if cell.role == "up"]
    half = replace(fp8, cells=tuple(fp8.cells[i] for i in ups), us=fp8.us[ups])
    cells = (Cell("joint", 16), Cell("joint", 64))
    alone = make_prior(bf16.shape, bf16.gpu, cells, bf16.table)
    taught = make_prior(bf16.shape, bf16.gpu, cells, bf16.table, (half,))
    assert taught.mean.shape == alone.mean.shape
    assert taught.residuals is None
    assert make_prior(bf16.shape, bf16.gpu, cells, bf16.table, (half, fp8)).residuals is not None


def test_the_basis_knows_which_configs_are_off_together(bf16: Landscape, fp8: Landscape) -> None:
    """Of a third recording's cells, it explains what the mean misses better than a random basis of its size."""
    int8 = Landscape.from_recording(Recording.load(RECORDINGS / "h200-E64-top8-K2048-N1024-int8_w8a8-channel.jsonl.gz"))
    prior = make_prior(bf16.shape, bf16.gpu, bf16.cells, bf16.table, (fp8, int8))
    basis = prior.basis(np.arange(len(bf16.table)))
    assert 10 < basis.shape[1] <= 128
    some = np.arange(0, len(bf16.table), 7)
    np.testing.assert_allclose(
        prior.basis(some) @ prior.basis(some).T, (basis @ basis.T)[np.ix_(some, some)], atol=0.02
    )
    log = np.log(bf16.us / np.nanmin(bf16.us, axis=1, keepdims=True), dtype=np.float64)
    left = squash(log) - prior.mean
    known = np.isfinite(left).all(axis=0)
    left = left[:, known] - left[:, known].mean(axis=1, keepdims=True)

    def explained(vectors: np.ndarray) -> float:
        return float(np.square(left @ np.linalg.qr(vectors[known] - vectors[known].mean(axis=0))[0]).sum())

    random = np.random.default_rng(0).standard_normal((len(basis), 8))
    assert explained(basis[:, -8:]) > 10 * explained(random)
    assert make_prior(bf16.shape, bf16.gpu, bf16.cells, bf16.table).basis(some).shape == (len(some), 0)


def test_joint_cells_are_sums_of_both_roles(bf16: Landscape, fp8: Landscape) -> None:
    cells = tuple(Cell("joint", m) for m in (2, 64))
    joint = expected_us(bf16.shape, bf16.gpu, cells, bf16.table)
    parts = [expected_us(bf16.shape, bf16.gpu, [Cell(role, 64)], bf16.table)[0] for role in ("up", "down")]
    np.testing.assert_allclose(joint[1], parts[0] + parts[1])
    assert make_prior(bf16.shape, bf16.gpu, cells, bf16.table, (fp8,)).mean.shape == (2, len(bf16.table))
    np.testing.assert_allclose(
        fp8.joint().us[0], fp8.us[fp8.cells.index(Cell("up", 2))] + fp8.us[fp8.cells.index(Cell("down", 2))]
    )


@pytest.mark.parametrize("name", ["NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA B200", "NVIDIA L40S"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8_w8a8", "int8_w8a16"])
def test_the_formula_has_a_number_for_every_gpu_and_config(name: str, dtype: str) -> None:
    shape = MoEShape(8, 2, 1024, 512, dtype=dtype, shared_experts=1)
    table = config_table(SearchSpace.wide(shape).configs()[::97])
    us = expected_us(shape, GpuSpec.by_name(name), [Cell("up", 1), Cell("down", 4096)], table)
    assert np.isfinite(us).all()
    assert (us > 0).all()
    assert us[1].min() > us[0].min()


def test_spilling_is_slow() -> None:
    shape, gpu = MoEShape(8, 2, 1024, 512), GpuSpec.by_name("H200")
    table = config_table([LaunchConfig(256, 256, 64, 1, 4, 3), LaunchConfig(256, 256, 64, 1, 8, 3)])
    us = expected_us(shape, gpu, [Cell("up", 4096)], table)[0]
    assert us[0] > 2 * us[1]


def test_tables_and_features() -> None:
    configs = (LaunchConfig(16, 32, 64, 1, 4, 2), LaunchConfig(16, 32, 64, 1, 4, 2, maxnreg=96, use_tma=True))
    table = config_table(configs)
    assert configs_of(table) == configs
    features = config_features(table)
    assert features.shape == (2, 11)
    assert (features[0] != features[1]).sum() == 2


def test_squash_keeps_the_order_and_leaves_good_times_alone() -> None:
    excess = np.array([0.0, 0.1, 0.2, 0.5, 1.0, 4.0])
    out = squash(excess)
    np.testing.assert_allclose(out[:3], excess[:3])
    assert (np.diff(out) > 0).all()
    assert out[-1] < 1.0
