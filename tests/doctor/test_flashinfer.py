"""FlashInfer's own tuning in a log, and its cache files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from moeopt.doctor import judge_caches
from moeopt.doctor.scan import scan
from moeopt.doctor.verdict import judge_log
from moeopt.errors import InvalidInputError

META = {"flashinfer_version": "0.7.2", "cuda_version": "13.0", "gpu": "NVIDIA H200"}
START = "server_args=ServerArgs(model_path='/m', tp_size=2, moe_runner_backend='flashinfer_cutlass', log_level='info')"
READY = "The server is fired up and ready to roll!"


def entry(rank: int, bucket: int) -> str:
    return str(("trtllm::fused_moe::gemm1", "MoERunner", ((bucket, 64), (8, 64)), (rank,)))


def write(path: Path, rank: int, tactic: int = 3, **meta: str) -> Path:
    tactics = {entry(rank, bucket): ["MoERunner", tactic] for bucket in (1, 8)}
    path.write_text(json.dumps({"_metadata": {**META, **meta}, **tactics}))
    return path


def log_codes(*lines: str) -> dict[str, str]:
    answer = judge_log(scan(io.BytesIO("\n".join((START, *lines, READY)).encode())))
    return {f.code: f.message for f in answer.findings}


def test_how_long_it_took() -> None:
    found = log_codes(
        "[2026-01-01 23:59:50 TP0] Running FlashInfer autotune with cache: /c/rank_tp0.json",
        "[2026-01-02 00:01:20 TP0] FlashInfer autotune completed.",
    )
    assert "took 90 s" in found["autotune"]


def test_what_became_of_the_cache() -> None:
    found = log_codes(
        "[Autotuner]: Loaded 42 configs from /c/rank_tp0.json",
        "FlashInfer autotune: per-rank caches disagree, discarding them and tuning from scratch so all ranks agree",
        "[Autotuner]: Cache file /c/r1.json was created in a different environment (gpu: A vs B). Ignoring",
    )
    assert "42 tactics from /c/rank_tp0.json" in found["autotune_loaded"]
    assert "at every start" in found["autotune_disagree"]
    assert "gpu: A vs B" in found["autotune_mismatch"]


def test_a_file_says_what_it_holds(tmp_path: Path) -> None:
    answer = judge_caches(write(tmp_path / "rank_tp0.json", 0), "NVIDIA H200")
    assert answer.status == 0 and answer.code == "flashinfer"
    assert "2 of trtllm::fused_moe::gemm1" in answer.findings[0].message
    assert "flashinfer_version 0.7.2" in answer.findings[0].message


def test_another_gpu_does_not_take_it(tmp_path: Path) -> None:
    answer = judge_caches(write(tmp_path / "r.json", 0), "NVIDIA B200")
    assert answer.status == 1
    assert "gpu NVIDIA B200 does not take it: it was tuned with gpu NVIDIA H200" in answer.findings[0].message
    assert judge_caches(write(tmp_path / "r.json", 0, gpu="*"), "NVIDIA B200").status == 0
    assert (
        "could not be told" in judge_caches(write(tmp_path / "r.json", 0, cuda_version="unknown")).findings[0].message
    )


def test_ranks_that_differ(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"rank_tp{rank}.json", rank)
    answer = judge_caches(tmp_path)
    assert answer.findings[0].code == "ranks_differ" and "4 keys are in some files only" in answer.findings[0].message
    write(tmp_path / "rank_tp1.json", 0, tactic=4)
    assert "2 of 2 shared keys have other tactics" in judge_caches(tmp_path).findings[0].message
    write(tmp_path / "rank_tp1.json", 0)
    assert judge_caches(tmp_path).status == 0


def test_a_managed_store(tmp_path: Path) -> None:
    entries = tmp_path / "v2" / "abc" / "entries"
    entries.mkdir(parents=True)
    (entries.parent / "manifest.json").write_text(json.dumps({**META, "cache_schema": "v2"}))
    (entries / "1.json").write_text(json.dumps({"key": entry(0, 1), "runner": "MoERunner", "tactic": [1, 2]}))
    (entries / "2.json").write_text("[]")
    answer = judge_caches(tmp_path)
    assert "managed store (v2) with 1 tactics" in answer.findings[0].message


@pytest.mark.parametrize("text", ["[]", "{}", "{broken", '{"1": {"BLOCK_SIZE_M": 16}}'])
def test_what_is_no_cache(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    for given in (path, tmp_path / "nowhere"):
        with pytest.raises(InvalidInputError) as error:
            judge_caches(given)
        assert "\n" not in str(error.value)
