"""moeopt's own search: quality on recordings, stopping, limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Failure, Job, Measurement
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import Landscape, load_landscapes
from moeopt.search.pool_search import PoolOptions, PoolSearch
from moeopt.testing.suites.strategy import play
from tests.search.replay import RECORDINGS, jobs_of, problem_of

FP8 = "h200-E256-top8-K6144-N256-fp8_w8a8.jsonl.gz"


@pytest.fixture(scope="module")
def fp8() -> Recording:
    return Recording.load(RECORDINGS / FP8)


@pytest.fixture
def tiny(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


def regret(recording: Recording, strategy: PoolSearch) -> float:
    """Mean over batch sizes of the chosen split's time over the best one's, less 1."""
    landscape = Landscape.from_recording(recording)
    row = {
        cell: dict(zip(landscape.configs, us, strict=True))
        for cell, us in zip(landscape.cells, landscape.us, strict=True)
    }
    out = []
    for m, chosen in strategy.choose().items():
        best = min(
            sum(
                min(us for c, us in row[Cell(role, m)].items() if c.block_size_m == block and np.isfinite(us))
                for role in ROLES
            )
            for block in {c.block_size_m for c in landscape.configs}
        )
        out.append(sum(row[Cell(role, m)][chosen[role].job.config] for role in ROLES) / best - 1)
    return float(np.mean(out))


@pytest.mark.parametrize(("taught", "most"), [(True, 0.01), (False, 0.02)])
def test_finds_nearly_the_best_split_with_24_of_1248(fp8: Recording, taught: bool, most: float) -> None:
    landscapes = load_landscapes(RECORDINGS, exclude_shape=fp8.shape) if taught else ()
    assert all(landscape.shape != fp8.shape for landscape in landscapes)
    found = []
    for seed in range(2):
        strategy = PoolSearch(problem_of(fp8, trials=24, seed=seed, landscapes=landscapes))
        generations = play(strategy, RecordedDevice(fp8))
        assert len(generations) <= 8
        assert len({job.config for job in jobs_of(generations)}) <= 150
        assert max(len(strategy.ledger.timed(cell)) for cell in strategy.problem.cells) <= 24
        found.append(regret(fp8, strategy))
    assert np.mean(found) < most


def test_every_cell_gets_its_whole_budget(tiny: Recording) -> None:
    strategy = PoolSearch(problem_of(tiny, trials=6))
    play(strategy, RecordedDevice(tiny))
    assert all(strategy.left(cell) == 0 for cell in strategy.problem.cells)
    assert all(len(strategy.ledger.timed(cell)) == 6 for cell in strategy.problem.cells)


def test_a_block_that_is_bad_for_the_partner_gets_little(tiny: Recording) -> None:
    """Up is 20 % faster with BLOCK_SIZE_M 64, down ten times slower: the sum decides where to look."""

    def us(job: Job) -> float:
        block = job.config.block_size_m
        wave = 1 + 0.03 * abs(np.log2(job.config.block_size_n) - 6) + 0.01 * job.config.num_stages
        return float(wave * (10 * 0.8 ** (block == 64) if job.cell.role == "up" else 10.0 * 10 ** (block == 64)))

    strategy = PoolSearch(problem_of(tiny, batch_sizes=(16, 64), trials=20))
    asked = []
    while jobs := strategy.ask():
        asked.append(jobs)
        strategy.tell([Measurement(job, "ok", us=(us(job),) * 3) for job in jobs])
    late = [job for jobs in asked[2:] for job in jobs if job.cell.role == "up"]
    assert sum(job.config.block_size_m == 64 for job in late) < 0.25 * len(late)
    assert all(m["up"].job.config.block_size_m != 64 for m in strategy.choose().values())


def test_learns_where_configs_do_not_compile(tiny: Recording) -> None:
    problem = problem_of(tiny, batch_sizes=(16,), trials=24)
    bad = {c for c in problem.candidates if c.block_size_n == 128}
    strategy = PoolSearch(problem)
    tried = set()
    while jobs := strategy.ask():
        tried |= {job.config for job in jobs}
        strategy.tell(
            [
                Measurement(job, "failed", failure=Failure("compile", "PassManager::run failed"))
                if job.config in bad
                else Measurement(job, "ok", us=(10.0 + job.config.num_stages,) * 3)
                for job in jobs
            ]
        )
    share = len(tried & bad) / len(tried)
    assert share < 0.6 * len(bad) / len(problem.candidates)
    assert all(strategy.left(cell) == 0 for cell in problem.cells), "what failed is made up for"


def test_ends_if_nothing_ever_compiles(tiny: Recording) -> None:
    strategy = PoolSearch(problem_of(tiny, trials=8))
    for _ in range(100):
        jobs = strategy.ask()
        if not jobs:
            break
        strategy.tell([Measurement(job, "failed", failure=Failure("compile", "no")) for job in jobs])
    else:
        pytest.fail("asks for ever")
    assert strategy.choose() == {}


def test_a_space_of_one_config_is_timed(tiny: Recording) -> None:
    problem = problem_of(tiny, batch_sizes=(16,), trials=8)
    strategy = PoolSearch(replace(problem, candidates=problem.candidates[:1]))
    assert {job.config for job in strategy.ask()} == set(problem.candidates[:1])


def test_jobs_that_were_never_answered_are_not_asked_again(tiny: Recording) -> None:
    strategy = PoolSearch(problem_of(tiny, trials=8))
    first, second = strategy.ask(), strategy.ask()
    assert first
    assert second
    assert not set(first) & set(second)


def test_the_portfolio_comes_first(tiny: Recording) -> None:
    problem = problem_of(tiny, batch_sizes=(16,), trials=16)
    listed = problem.candidates[-3:]
    foreign = LaunchConfig(256, 256, 256, 64, 8, 5)
    plain = {job.config for job in PoolSearch(problem).ask()}
    strategy = PoolSearch(replace(problem, portfolio=(foreign, *listed)), options=PoolOptions(portfolio_bonus=1.0))
    first = {job.config for job in strategy.ask()}
    assert not set(listed) <= plain
    assert set(listed) <= first
    assert foreign not in first


def test_a_wide_space_is_cut_to_its_best_and_stays_within_the_limits(fp8: Recording) -> None:
    space = SearchSpace.wide(fp8.shape)
    candidates = tuple(itertools.islice(space.configs(), 0, None, 3))
    cells = tuple(Cell(role, m) for m in (1, 64, 1024) for role in ROLES)
    problem = problem_of(fp8, space=space, candidates=candidates, cells=cells, trials=10)
    strategy = PoolSearch(problem, options=PoolOptions(pool=600, most_configs=20, configs_per_trial=1))
    assert len(strategy._pool.configs) <= 600 + 6
    jobs = []
    while asked := strategy.ask():
        jobs += asked
        strategy.tell([Measurement(job, "ok", us=(10.0 + job.config.block_size_n / 64,) * 3) for job in asked])
    assert {job.config for job in jobs} <= set(candidates)
    assert len({job.config for job in jobs}) <= 20
