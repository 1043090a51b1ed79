"""Routing distributions and files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError
from moeopt.kernels.routing import Routing

SHAPE = MoEShape(32, 4, 64, 64)
UNIFORM = [[[2, 9, 12, 31], [4, 7, 19, 28]]]
DRAWN = ("uniform", "zipf:1.2", "dirichlet:0.5", "dirichlet:0.001", "zipf:0")


@pytest.mark.parametrize(
    ("text", "key"), [("uniform", "uniform"), (" zipf:1.20", "zipf:1.2"), ("dirichlet:2", "dirichlet:2")]
)
def test_keys(text: str, key: str) -> None:
    assert Routing.parse(text).key == key
    assert Routing.parse(Routing.parse(text).key).key == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zipf",
        "zipf:",
        "zipf:x",
        "zipf:-1",
        "zipf:nan",
        "dirichlet:0",
        "dirichlet:inf",
        "uniform:1",
        "file:",
        "random",
    ],
)
def test_unknown_routings_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"uniform, zipf:1\.2, dirichlet:0\.5 or file:PATH"):
        Routing.parse(text)


@given(
    text=st.sampled_from(DRAWN),
    experts=st.integers(1, 40),
    data=st.data(),
    batch_size=st.integers(1, 50),
    ep_size=st.integers(1, 3),
)
@settings(deadline=None)
def test_draws_are_valid(text: str, experts: int, data: st.DataObject, batch_size: int, ep_size: int) -> None:
    shared = data.draw(st.integers(0, min(experts, 2)), label="shared")
    routed = data.draw(st.integers(0, (experts - shared) * ep_size), label="routed")
    if routed + shared == 0:
        return
    shape = MoEShape(experts, routed + shared, 8, 8, shared_experts=shared, ep_size=ep_size)
    ids = Routing.parse(text).draw(shape, batch_size, 2, 7)
    assert ids.dtype == np.int32 and ids.shape == (2, batch_size, shape.top_k)
    assert ids.min() >= -1 and ids.max() < experts
    assert (ids[..., routed:] == np.arange(experts - shared, experts)).all()
    assert ids[..., :routed].max(initial=-1) < experts - shared
    for token in ids.reshape(-1, shape.top_k):
        here = token[token >= 0]
        assert len(set(here.tolist())) == len(here)
    if ep_size == 1:
        assert ids.min() >= 0


@pytest.mark.parametrize("text", DRAWN)
def test_seeds_decide(text: str) -> None:
    routing = Routing.parse(text)
    first = routing.draw(SHAPE, 20, 3, 1)
    assert np.array_equal(first, routing.draw(SHAPE, 20, 3, 1))
    assert np.array_equal(first[:2], routing.draw(SHAPE, 20, 2, 1))
    assert not np.array_equal(first, routing.draw(SHAPE, 20, 3, 2))
    assert not np.array_equal(first[0], first[1])


def test_uniform_is_the_same_on_every_machine() -> None:
    assert Routing.parse("uniform").draw(SHAPE, 2, 1, 0).tolist() == UNIFORM


def shares(text: str, shape: MoEShape = SHAPE) -> np.ndarray[Any, Any]:
    """Of each draw, the experts' shares of the tokens, greatest first."""
    ids = Routing.parse(text).draw(shape, 4000, 5, 0)
    counts = np.stack([np.bincount(d.ravel(), minlength=shape.num_experts) for d in ids])
    return -np.sort(-counts / 4000, axis=1)


def test_uniform_shares() -> None:
    assert np.abs(shares("uniform") - 4 / 32).max() < 0.03
    # Few experts: drawn another way.
    few = MoEShape(6, 4, 8, 8)
    assert np.abs(shares("uniform", few) - 4 / 6).max() < 0.04


def test_zipf_shares_follow_the_exponent() -> None:
    one = MoEShape(32, 1, 8, 8)
    expected = np.arange(1, 33) ** -1.2
    expected /= expected.sum()
    assert np.abs(shares("zipf:1.2", one) - expected).max() < 0.03
    assert np.abs(shares("zipf:0", one) - 1 / 32).max() < 0.02


def test_dirichlet_concentrates_with_small_alpha() -> None:
    top = [shares(f"dirichlet:{a}", MoEShape(32, 1, 8, 8))[:, 0].mean() for a in (0.01, 0.3, 100.0)]
    assert top[0] > 0.8 > 0.5 > top[1] > 0.1 > top[2]


def test_popular_experts_differ_between_draws() -> None:
    ids = Routing.parse("zipf:2").draw(MoEShape(32, 1, 8, 8), 500, 6, 0)
    assert len({int(np.bincount(d.ravel(), minlength=32).argmax()) for d in ids}) > 2


def test_shares_of_expert_parallel_ranks() -> None:
    shape = MoEShape(8, 4, 8, 8, ep_size=4)
    ids = Routing.parse("uniform").draw(shape, 4000, 1, 0)
    assert (ids >= 0).mean() == pytest.approx(0.25, abs=0.02)


def test_too_few_experts_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match="3 routed experts"):
        Routing.parse("uniform").draw(MoEShape(2, 4, 8, 8, shared_experts=1, ep_size=2), 1, 1, 0)


# -- files --------------------------------------------------------------------------------------


def saved(path: Path, value: Any) -> Routing:
    if path.suffix == ".npy":
        np.save(path, value)
    else:
        torch.save(value, path)
    return Routing.parse(f"file:{path}")


LAYERS = np.stack(
    [np.sort(np.random.default_rng(i).permuted(np.tile(np.arange(32), (50, 1)), axis=1)[:, :4]) for i in range(3)]
)


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_files_give_their_own_tokens(tmp_path: Path, suffix: str) -> None:
    routing = saved(tmp_path / f"ids{suffix}", LAYERS if suffix == ".npy" else torch.from_numpy(LAYERS))
    drawn = routing.draw(SHAPE, 10, 4, 0)
    assert drawn.shape == (4, 10, 4)
    for index, ids in enumerate(drawn):
        layer = LAYERS[index % 3]
        starts = [i for i in range(41) if np.array_equal(layer[i : i + 10], ids)]
        assert len(starts) == 1  # ten neighbours
    assert np.array_equal(drawn, routing.draw(SHAPE, 10, 4, 0))
    known = {tuple(t) for t in LAYERS[0].tolist()}
    assert {tuple(t) for t in routing.draw(SHAPE, 200, 1, 0)[0].tolist()} <= known  # more than it has


def test_files_of_layers_with_other_token_counts(tmp_path: Path) -> None:
    tensors = {"a": torch.tensor([[0, 1, 2, 3]] * 3), "b": torch.tensor([[4, 5, 6, 7]])}
    drawn = saved(tmp_path / "ids.pt", tensors).draw(SHAPE, 2, 2, 0)
    assert drawn.tolist() == [[[0, 1, 2, 3]] * 2, [[4, 5, 6, 7]] * 2]
    assert len(saved(tmp_path / "list.pt", list(tensors.values())).arrays) == 2


def test_a_files_key_is_of_its_content(tmp_path: Path) -> None:
    one, same = saved(tmp_path / "a.npy", LAYERS), saved(tmp_path / "b.npy", LAYERS)
    assert one.key == same.key and one.key.startswith("file:") and len(one.key) == 21
    assert saved(tmp_path / "a.npy", LAYERS[:2]).key != one.key


def test_files_with_shared_experts_and_other_ranks(tmp_path: Path) -> None:
    routing = saved(tmp_path / "a.npy", np.array([[0, 9, 3]], dtype=np.int64))
    shared = MoEShape(5, 4, 8, 8, shared_experts=1, ep_size=3)
    assert routing.draw(shared, 1, 1, 0).tolist() == [[[0, -1, 3, 4]]]
    with_shared = saved(tmp_path / "b.npy", np.array([[0, 3, 4]], dtype=np.int32))
    assert with_shared.draw(MoEShape(5, 3, 8, 8, shared_experts=1), 1, 1, 0).tolist() == [[[0, 3, 4]]]
    without = saved(tmp_path / "c.npy", np.array([[0, 3]], dtype=np.int32))
    assert without.draw(MoEShape(5, 3, 8, 8, shared_experts=1), 1, 1, 0).tolist() == [[[0, 3, 4]]]


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("a.npy", np.ones((2, 4), dtype=np.float32), "whole numbers"),
        ("a.npy", np.ones(4, dtype=np.int32), "shape"),
        ("a.npy", np.ones((0, 4), dtype=np.int32), "shape"),
        ("a.npy", np.full((2, 4), -2), "-1 or more"),
        ("a.npy", np.array([{"a": 1}]), "not a .npy file"),
        ("a.pt", torch.ones((2, 4)), "whole numbers"),
        ("a.pt", 5, "expected a tensor"),
        ("a.pt", [torch.ones((2, 4), dtype=torch.int32), "x"], "tensors only"),
        ("a.pt", [], "no array"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, value: Any, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        saved(tmp_path / name, value)


@pytest.mark.parametrize("name", ["a.npy", "a.pt", "a.txt"])
def test_files_of_another_format_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not an array")
    with pytest.raises(InvalidInputError, match=r"\.npy|\.pt"):
        Routing.parse(f"file:{tmp_path / name}")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        Routing.parse(f"file:{tmp_path / 'missing.npy'}")


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        (MoEShape(32, 5, 8, 8), "4 experts per token: expected 5"),
        (MoEShape(8, 4, 8, 8), "the shape has 8"),
        (MoEShape(32, 4, 8, 8, shared_experts=1, ep_size=2), "expected 3"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path: Path, shape: MoEShape, word: str) -> None:
    with pytest.raises(InvalidInputError, match=word):
        saved(tmp_path / "a.npy", LAYERS).draw(shape, 1, 1, 0)


def test_expected_work_of_uniform_routing() -> None:
    """Experts visited by M tokens: E (1 - (1 - k/E)^M)."""
    shape = MoEShape(256, 8, 8, 8)
    ids = Routing.parse("uniform").draw(shape, 64, 20, 0)
    visited = np.mean([len(np.unique(d)) for d in ids])
    assert visited == pytest.approx(256 * (1 - (1 - 8 / 256) ** 64), rel=0.02)
    assert math.isfinite(visited)
