"""Short lists from recordings, engines' files and earlier tunes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import Landscape, load_landscapes
from moeopt.search.portfolio import engine_portfolio, greedy_portfolio, merge_portfolios, similarity
from tests.search.replay import RECORDINGS

A, B, C = LaunchConfig(16, 64, 64, 1, 4, 3), LaunchConfig(64, 64, 64, 1, 4, 3), LaunchConfig(128, 128, 64, 16, 8, 4)
SHAPE = MoEShape(256, 8, 3072, 256)
H200 = GpuSpec.by_name("H200")


def entry(config: LaunchConfig) -> dict[str, int | bool]:
    return config.to_dict()


def write(directory: Path, name: str, entries: dict[int, LaunchConfig]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(json.dumps({str(m): entry(c) for m, c in entries.items()}))


def test_greedy_lists_get_better_with_length(tiny_recording: Callable[..., Path]) -> None:
    landscape = Landscape.from_recording(Recording.load(tiny_recording()))
    cells = [Cell(role, m) for m in (1, 16, 64) for role in ("up", "down")]
    other = landscape.shape.replace(num_experts=16)
    found = {n: greedy_portfolio([landscape], other, cells, landscape.configs, n) for n in (1, 4, 12)}
    assert len(found[4]) == 4
    assert found[12][:4] == found[4]
    columns = {c: j for j, c in enumerate(landscape.configs)}

    def loss(configs: tuple[LaunchConfig, ...]) -> float:
        best = np.nanmin(landscape.us, axis=1)
        return float(np.mean(np.nanmin(landscape.us[:, [columns[c] for c in configs]], axis=1) / best))

    assert loss(found[12]) <= loss(found[4]) < loss(found[1])
    assert loss(found[12]) < 1.001


def test_greedy_takes_candidates_only_and_may_have_nothing_to_go_by(tiny_recording: Callable[..., Path]) -> None:
    landscape = Landscape.from_recording(Recording.load(tiny_recording()))
    some = landscape.configs[::7]
    found = greedy_portfolio([landscape], landscape.shape, [Cell("joint", 16)], some, 5)
    assert found
    assert set(found) <= set(some)
    assert greedy_portfolio([], SHAPE, [Cell("up", 16)], some) == ()
    assert greedy_portfolio([landscape], SHAPE, [Cell("up", 16)], [C]) == ()


def test_a_portfolio_of_another_shape_is_good_for_this_one() -> None:
    recording = Recording.load(RECORDINGS / "h200-E256-top8-K3072-N256-bf16.jsonl.gz")
    truth = Landscape.from_recording(recording)
    others = load_landscapes(RECORDINGS, exclude_shape=recording.shape)
    listed = greedy_portfolio(others, recording.shape, truth.cells, truth.configs, 16)
    columns = {c: j for j, c in enumerate(truth.configs)}
    best = np.nanmin(truth.us, axis=1)
    median = float(np.mean(np.nanmedian(truth.us, axis=1) / best))
    loss = float(np.mean(np.nanmin(truth.us[:, [columns[c] for c in listed]], axis=1) / best))
    assert loss < 1.2 < median


def test_engine_files_of_the_nearest_shape_and_gpu_come_first(tmp_path: Path) -> None:
    configs = tmp_path / "configs" / "triton_3_4_0"
    write(configs, "E=256,N=256,device_name=NVIDIA_H200.json", {1: A, 64: A, 4096: B})
    write(configs, "E=8,N=4096,device_name=NVIDIA_A100-SXM4-80GB.json", {1: C})
    write(configs, "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", {1: LaunchConfig(256, 256, 64, 1, 8, 2)})
    (configs / "E=256,N=128,device_name=NVIDIA_H200.json").write_text("{")
    found = engine_portfolio(SHAPE, H200, (1, 64, 4096), [tmp_path])
    assert found[0] == A
    assert set(found) == {A, B, C}


def test_blackwell_workstation_cards_take_the_files_of_their_kind(tmp_path: Path) -> None:
    gpu = GpuSpec.by_name("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    for n in (255, 257, 258, 259, 260):
        write(tmp_path, f"E={n},N=256,device_name=NVIDIA_H200.json", {1: C})
    write(tmp_path, "E=64,N=1024,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition.json", {1: A})
    assert A in engine_portfolio(SHAPE, gpu, (1,), [tmp_path])


def test_an_engine_that_is_not_installed_has_nothing(tmp_path: Path) -> None:
    assert engine_portfolio(SHAPE, H200, (1,), [tmp_path]) == ()


def test_merging_takes_turns_and_drops_what_is_no_candidate() -> None:
    assert merge_portfolios([[A, B], [C, A]], [A, B, C]) == (A, C, B)
    assert merge_portfolios([[A, B], [C]], [B, C]) == (B, C) or merge_portfolios([[A, B], [C]], [B, C]) == (C, B)
    assert merge_portfolios([[A, B, C]], [A, B, C], size=2) == (A, B)
    assert merge_portfolios([], [A]) == ()


@pytest.mark.parametrize("size", [1, 3])
def test_size_is_a_limit(tiny_recording: Callable[..., Path], size: int) -> None:
    landscape = Landscape.from_recording(Recording.load(tiny_recording()))
    found = greedy_portfolio([landscape], SHAPE, [Cell("up", 512)], landscape.configs, size)
    assert 1 <= len(found) <= size


def test_similar_cells() -> None:
    recorded = Landscape.from_recording(Recording.load(RECORDINGS / "h200-E256-top8-K3072-N256-bf16.jsonl.gz"))
    cells = [Cell("up", 64), Cell("down", 64)]
    same = similarity(recorded.shape, cells, recorded)
    up, down = recorded.cells.index(cells[0]), recorded.cells.index(cells[1])
    assert same[0, up] == pytest.approx(1.0)
    assert same[0, down] == 0.0
    # Half the experts: the same tokens per expert at half the batch size.
    half = recorded.shape.replace(num_experts=128)
    likes = similarity(half, [Cell("up", 32)], recorded)[0]
    assert recorded.cells[int(np.argmax(likes))] == Cell("up", 64)
