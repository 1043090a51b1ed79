"""Recordings as priors: what is read, what is left out, and the summary of the shipped ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeopt.core.trial import Cell
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import SUMMARY, Landscape, load_landscapes, write_summary
from tests.search.replay import RECORDINGS


def test_medians_of_a_recording(tiny_recording: Callable[..., Path]) -> None:
    recording = Recording.load(tiny_recording())
    landscape = Landscape.from_recording(recording)
    assert landscape.cells == tuple(Cell(role, m) for role in ("up", "down") for m in (1, 16, 64))
    assert set(landscape.configs) == {c for c, row in recording.rows.items() if row.status != "out_of_resources"}
    column = {c: j for j, c in enumerate(landscape.configs)}
    for config, row in recording.rows.items():
        if row.status == "compile_error":
            assert np.isnan(landscape.us[:, column[config]]).all()
        elif row.status == "ok":
            assert landscape.us[1, column[config]] == np.float32(np.median(row.roles["up"].us[16]))


def test_nothing_is_learned_from_the_held_out_recordings() -> None:
    held_out = sorted((RECORDINGS / "held-out").glob("*.jsonl.gz"))
    assert len(held_out) == 5
    assert not {Recording.load(path).shape for path in held_out} & {x.shape for x in load_landscapes()}


def test_the_shape_that_is_tuned_is_left_out(tiny_recording: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_recording()
    shape = Recording.load(path).shape
    other = {"num_experts": 16, "top_k": 2, "hidden_size": 256, "intermediate_size": 128, "dtype": "bf16",
             "block_shape": None}  # fmt: skip
    tiny_recording("other.jsonl.gz", shape=other)
    tiny_recording("same-shape-other-gpu.jsonl.gz", gpu={"name": "NVIDIA B200"})
    assert len(load_landscapes(tmp_path)) == 3
    left = load_landscapes(tmp_path, exclude_shape=shape)
    assert [x.shape.num_experts for x in left] == [16]
    here = load_landscapes(tmp_path, exclude_shape=shape, exclude_gpu="NVIDIA H200")
    assert sorted((x.shape.num_experts, x.gpu.name) for x in here) == [(8, "NVIDIA B200"), (16, "NVIDIA H200")]


def test_the_summary_says_what_the_recordings_say(
    tiny_recording: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_recording()
    whole = load_landscapes(tmp_path)[0]
    write_summary(tmp_path)
    with caplog.at_level(logging.INFO):
        short = load_landscapes(tmp_path)[0]
    assert not caplog.records, "the recording was parsed although the summary has it"
    assert (short.shape, short.gpu, short.cells, short.configs) == (
        whole.shape, whole.gpu, whole.cells, whole.configs)  # fmt: skip
    np.testing.assert_allclose(short.us, whole.us, rtol=2e-3)
    near = whole.us < 1.1 * np.nanmin(whole.us, axis=1, keepdims=True)
    np.testing.assert_allclose(short.us[near], whole.us[near], rtol=1e-4)


def test_what_only_the_summary_has_counts(tiny_recording: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_recording()
    tiny_recording("other.jsonl.gz", gpu={"name": "NVIDIA B200"})
    write_summary(tmp_path)
    path.unlink()
    assert [x.gpu.name for x in load_landscapes(tmp_path)] == ["NVIDIA B200", "NVIDIA H200"]


def test_a_recording_that_changed_is_read_again(tiny_recording: Callable[..., Path], tmp_path: Path) -> None:
    tiny_recording()
    write_summary(tmp_path)
    tiny_recording(gpu={"name": "NVIDIA B200"}, note="so that its size differs")
    assert load_landscapes(tmp_path)[0].gpu.name == "NVIDIA B200"


def test_the_shipped_summary_is_up_to_date(caplog: pytest.LogCaptureFixture) -> None:
    """After adding a recording: python -m moeopt.recordings.landscape"""
    assert (RECORDINGS / SUMMARY).exists()
    with caplog.at_level(logging.INFO):
        shipped = load_landscapes()
    assert not caplog.records, "run python -m moeopt.recordings.landscape"
    assert len(shipped) == len(list(RECORDINGS.glob("*.jsonl.gz")))
