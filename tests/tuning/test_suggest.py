"""Suggestions: legal, better than the default on recordings, and never mixed with what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moeopt import engines
from moeopt.cli import build_app
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import illegal_reason
from moeopt.core.shape import DEFAULT_BATCH_SIZES, ROLES, MoEShape
from moeopt.core.table import ConfigTable
from moeopt.errors import ExportError
from moeopt.export import export_configs
from moeopt.export.install import install_configs
from moeopt.export.write import MARKER
from moeopt.recordings.format import Recording
from moeopt.tuning.suggest import suggest, write_suggestions

RTX_PRO = GpuSpec.by_name("NVIDIA RTX PRO 6000 Blackwell Server Edition")
FP8 = MoEShape(257, 9, 6144, 256, "fp8_w8a8", (128, 128), shared_experts=1)
RECORDINGS = sorted((Path(__file__).parents[2] / "studies" / "recordings").glob("h200-E256-*.jsonl.gz"))


@pytest.mark.parametrize("space", ["grid", "wide"])
def test_legal_and_one_block_size_m(space: str) -> None:
    found = suggest(FP8, RTX_PRO, DEFAULT_BATCH_SIZES, space=space)
    assert list(found) == list(DEFAULT_BATCH_SIZES)
    for s in found.values():
        assert s.up.block_size_m == s.down.block_size_m
        for role, config in (("up", s.up), ("down", s.down)):
            assert illegal_reason(config, FP8, role, RTX_PRO) is None
        assert s.predicted_us <= s.predicted_default_us


def test_small_batches_get_small_tiles() -> None:
    found = suggest(FP8, RTX_PRO, [1, 64, 16384])
    assert found[1].up.block_size_m == found[64].up.block_size_m == 16
    assert found[16384].up.block_size_m >= 64


def test_joint_is_one_config() -> None:
    assert all(s.up == s.down for s in suggest(FP8, RTX_PRO, [4, 1024], mode="joint").values())


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.name.split(".")[0])
def test_on_a_recording_it_beats_the_default(path: Path) -> None:
    recording = Recording.load(path)
    found = suggest(recording.shape, recording.gpu, recording.batch_sizes)
    gains, regrets = [], []
    for m, s in found.items():
        default = engines.get("sglang").default_config(recording.shape, m, recording.gpu)

        def us(role, config, m=m):
            return float(np.median(recording.rows[config].roles[role].us[m]))

        ours = us("up", s.up) + us("down", s.down)
        if default in recording.rows:
            gains.append(sum(us(role, default) for role in ROLES) / ours)
        best = {}
        for config, row in recording.rows.items():
            for role in ROLES if row.status == "ok" else ():
                key = (config.block_size_m, role)
                best[key] = min(best.get(key, np.inf), us(role, config))
        regrets.append(ours / min(best[(b, "up")] + best[(b, "down")] for b, r in best if r == "up") - 1)
    assert np.exp(np.mean(np.log(gains))) > 1.1
    assert np.mean(regrets) < 0.20


class TestFiles:
    def test_marked_before_anything_else(self, tmp_path: Path) -> None:
        found = suggest(FP8, RTX_PRO, [1, 64])
        paths = write_suggestions("sglang", tmp_path / "out", FP8, RTX_PRO, "3.6.0", found)
        assert len(paths) == 3
        marker = json.loads((tmp_path / "out" / MARKER).read_text())
        assert marker["measured"] is False
        assert set(marker["batch_sizes"]) == {"1", "64"}
        written = json.loads(paths[0].read_text())
        assert written["64"] == found[64].up.to_dict()

    def test_never_among_files_that_may_be_measured(self, tmp_path: Path) -> None:
        found = suggest(FP8, RTX_PRO, [1])
        folder = tmp_path / "configs" / "triton_3_6_0"
        folder.mkdir(parents=True)
        (folder / "E=8,N=8,device_name=NVIDIA_H200.json").write_text("{}")
        with pytest.raises(ExportError, match="may be measured"):
            write_suggestions("sglang", tmp_path, FP8, RTX_PRO, "3.6.0", found)
        assert not (tmp_path / MARKER).exists()

    def test_the_exporter_itself_never_mixes_them(self, tmp_path: Path) -> None:
        s = suggest(FP8, RTX_PRO, [1])[1]
        args = (FP8, RTX_PRO.name, "3.6.0", ConfigTable({1: s.pair}))
        measured, marked = tmp_path / "measured", tmp_path / "marked"
        written = export_configs("sglang", measured, *args)
        before = written[0].read_bytes()
        with pytest.raises(ExportError, match="not marked"):
            export_configs("sglang", measured, *args, unmeasured=True)
        assert written[0].read_bytes() == before
        write_suggestions("sglang", marked, FP8, RTX_PRO, "3.6.0", {1: s})
        with pytest.raises(ExportError, match="unmeasured suggestions"):
            export_configs("sglang", marked, *args)
        with pytest.raises(ExportError, match="unmeasured suggestions"):
            install_configs("sglang", *args, environment={"SGLANG_MOE_CONFIG_DIR": str(marked)})

    def test_its_own_directory_can_be_written_again(self, tmp_path: Path) -> None:
        for sizes in ([1, 64], [2]):
            found = suggest(FP8, RTX_PRO, sizes)
            paths = write_suggestions("sglang", tmp_path, FP8, RTX_PRO, "3.6.0", found)
        assert set(json.loads(paths[0].read_text())) == {"2"}


class TestCommand:
    ARGS = (
        "--experts", "256", "--top-k", "8", "--hidden", "3072", "--intermediate", "256", "--dtype", "bf16",
    )  # fmt: skip

    def test_says_that_nothing_was_measured(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        done = CliRunner().invoke(
            build_app(), ["suggest", str(out), *self.ARGS, "--gpu", "rtx 5090", "--batch-sizes", "1,64"]
        )
        assert done.exit_code == 0, done.output
        assert done.output.startswith("UNMEASURED")
        assert list(out.rglob("*NVIDIA_GeForce_RTX_5090*.json"))

    def test_vllm_gets_one_file(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        args = [
            "suggest", str(out), *self.ARGS, "--gpu", "NVIDIA H200", "--engine", "vllm", "--batch-sizes", "64",
        ]  # fmt: skip
        assert CliRunner().invoke(build_app(), args).exit_code == 0
        assert len(list(out.glob("E=*.json"))) == 1
