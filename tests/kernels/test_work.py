"""Bytes, operations and visits of a launch, against drawn routings that are counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from moeopt.core.shape import ROLES, MoEShape
from moeopt.kernels.routing import Routing
from moeopt.kernels.work import Visits, counted_visits, expected_visits, expert_bytes, launch_work

QWEN = MoEShape(256, 8, 3072, 256)
GLM5 = MoEShape(257, 9, 6144, 256, shared_experts=1)
SHARED_EP = MoEShape(33, 9, 6144, 256, shared_experts=1, ep_size=8)
ALL_RANKS = MoEShape(16, 6, 512, 256, ep_size=4)
DRAWS = 400


def simulate(shape: MoEShape, batch_size: int) -> np.ndarray:
    """Tokens of each expert of the first rank, [DRAWS, E], the shared ones last."""
    rng = np.random.default_rng(0)
    local, routed = shape.num_experts - shape.shared_experts, shape.top_k - shape.shared_experts
    tokens = np.full((DRAWS, shape.num_experts), batch_size)
    for counts in tokens:
        chosen = np.argsort(rng.random((batch_size, local * shape.ep_size)), axis=1)[:, :routed]
        counts[:local] = np.bincount(chosen.ravel(), minlength=local * shape.ep_size)[:local]
    return tokens


def near(draws: np.ndarray) -> object:
    """What lies within four standard errors of the mean of the draws."""
    return pytest.approx(draws.mean(), abs=4 * draws.std() / len(draws) ** 0.5 + 1e-6, rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 8, 64])
@pytest.mark.parametrize("shape", [QWEN, GLM5, SHARED_EP, ALL_RANKS], ids=lambda shape: shape.slug())
def test_expected_visits_and_work_against_a_simulation(shape: MoEShape, batch_size: int) -> None:
    tokens = simulate(shape, batch_size)
    experts, pairs = (tokens > 0).sum(axis=1), tokens.sum(axis=1)
    expected = expected_visits(shape, batch_size)
    assert expected.experts == near(experts)
    assert expected.pairs == near(pairs)
    for role in ROLES:
        rows, k = shape.output_rows(role), shape.reduction(role)
        read = pairs if role == "down" else batch_size
        work = launch_work(shape, role, batch_size)
        assert work.bytes == near(experts * rows * k * 2 + read * k * 2 + batch_size * shape.top_k * rows * 2)
        assert work.flops == near(2 * pairs * rows * k)


@pytest.mark.parametrize("shape", [QWEN, GLM5, SHARED_EP, ALL_RANKS], ids=lambda shape: shape.slug())
def test_what_is_timed_is_what_is_expected(shape: MoEShape) -> None:
    """The same of the routings that a device draws: within 3 % over 200 launches."""
    drawn = Routing.parse("uniform").draw(shape, 32, 200, seed=1)
    counted, expected = counted_visits(drawn, shape.num_experts), expected_visits(shape, 32)
    assert counted.experts == pytest.approx(expected.experts, rel=0.03)
    assert counted.pairs == pytest.approx(expected.pairs, rel=0.03)


def test_shared_experts_are_visited_by_every_token_on_every_rank() -> None:
    assert expected_visits(GLM5, 8).experts == pytest.approx(1 + 256 * (1 - (1 - 8 / 256) ** 8))
    assert expected_visits(GLM5, 8).experts == pytest.approx(58.4, abs=0.05)
    assert expected_visits(SHARED_EP, 64).pairs == 64 + 64 * 8 / 8
    assert launch_work(SHARED_EP, "up", 64).flops == 2 * 128 * 512 * 6144
    only_shared = MoEShape(2, 2, 256, 128, shared_experts=2)
    assert expected_visits(only_shared, 5) == Visits(2.0, 10.0)
    every = MoEShape(4, 4, 256, 128)
    assert expected_visits(every, 3) == Visits(4.0, 12.0)


def test_ranks_share_the_routed_experts() -> None:
    one = expected_visits(QWEN.replace(ep_size=4, num_experts=64), 16)
    whole = expected_visits(QWEN, 16)
    assert one.experts == pytest.approx(whole.experts / 4)
    assert one.pairs == pytest.approx(whole.pairs / 4)


def test_few_tokens_visit_top_k_and_many_all() -> None:
    assert expected_visits(QWEN, 1).experts == pytest.approx(8)
    assert expected_visits(QWEN, 4096).experts == pytest.approx(256, abs=0.01)


def test_ids_of_other_ranks_are_not_counted() -> None:
    assert counted_visits(np.array([[[0, 1], [1, 9], [-1, 2]]], dtype=np.int32), 8) == Visits(3.0, 4.0)
    two = np.array([[[0, 1]], [[-1, -1]]], dtype=np.int32)
    assert counted_visits(two, 8) == Visits(1.0, 1.0)


def test_bytes_of_an_expert() -> None:
    assert expert_bytes(QWEN, "up") == 512 * 3072 * 2
    assert expert_bytes(QWEN, "down") == 3072 * 256 * 2
    block = MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128))
    assert expert_bytes(block, "up") == 512 * 6144 + 4 * 4 * 48
    grouped = MoEShape(8, 2, 256, 128, "int4_w4a16", group_size=64)
    assert expert_bytes(grouped, "up") == 256 * 128 + 2 * 256 * 4
    assert expert_bytes(MoEShape(8, 2, 256, 128, "fp8_w8a8", per_channel=True), "up") == 256 * 256 + 4 * 256


def test_bytes_are_touched_weights_once_activations_and_outputs() -> None:
    up = launch_work(QWEN, "up", 64, Visits(200, 64 * 8))
    assert up.bytes == 200 * 512 * 3072 * 2 + 64 * 3072 * 2 + 64 * 8 * 512 * 2
    assert up.flops == 2 * 64 * 8 * 512 * 3072
    down = launch_work(QWEN, "down", 64, Visits(200, 64 * 8))
    assert down.bytes == 200 * 3072 * 256 * 2 + 64 * 8 * 256 * 2 + 64 * 8 * 3072 * 2
    fp8 = launch_work(MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128)), "up", 1, Visits(8, 8))
    assert fp8.bytes == 8 * (512 * 6144 + 4 * 4 * 48) + 6144 + 8 * 512 * 2
