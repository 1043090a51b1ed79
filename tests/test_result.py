"""What a tune gives back: look-ups, sums, files, pages."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.provenance import Provenance
from moeopt.core.shape import MoEShape
from moeopt.errors import ExportError, InvalidInputError
from moeopt.report.dashboard import latency_figure, speedup_figure
from moeopt.result import TuneResult
from moeopt.tuning.outcome import BatchResult, Counts, RoleResult

CONFIG = LaunchConfig(16, 64, 128, 1, 4, 3)
OTHER = LaunchConfig(16, 32, 64, 16, 4, 4)
INFO = Provenance(
    source="a test", kernel="builtin", kernel_version="1", kernel_hash="00", triton="3.6.0", torch="2.11.0"
)


def row(m: int, default: float | None = 20.0, joint: LaunchConfig | None = None) -> BatchResult:
    return BatchResult(
        m,
        up=RoleResult(CONFIG, 8.0, 24, default_us=default, roofline_us=6.0),
        down=RoleResult(OTHER, 4.0, 24, default_us=default, roofline_us=3.0),
        joint_config=joint,
        joint_us=13.0 if joint else None,
    )


def result(*rows: BatchResult, mode: str = "split") -> TuneResult:
    return TuneResult(
        shape=MoEShape(8, 2, 256, 128),
        gpu="NVIDIA H200",
        info=INFO,
        mode=mode,  # type: ignore[arg-type]
        space="grid",
        seed=0,
        wall_s=1.5,
        rows={r.batch_size: r for r in rows},
        counts=Counts(space=10, reasons={"compile": 2}),
        notes=("a <note>",),
    )


def test_sums_and_shares() -> None:
    one = row(16)
    assert one.total_us == 12.0
    assert one.default_us == 40.0
    assert one.speedup == pytest.approx(40 / 12)
    assert one.roofline_fraction == pytest.approx(0.75)
    unknown = row(16, default=None)
    assert unknown.default_us is None and unknown.speedup is None


def test_best_names_what_was_tuned() -> None:
    made = result(row(16), row(64))
    assert made.best(64).batch_size == 64
    with pytest.raises(InvalidInputError, match="batch size 32 was not tuned: tuned are 16, 64"):
        made.best(32)


def test_geomean_is_over_the_known() -> None:
    assert result(row(1), row(2, default=None)).geomean_speedup() == pytest.approx(40 / 12)
    assert result(row(1, default=None)).geomean_speedup() is None
    assert math.isclose(result(row(1), row(2, default=6.0)).geomean_speedup() or 0, math.sqrt(40 / 12 * 1.0))


def test_sglang_gets_both_files_and_vllm_the_joint_config(tmp_path: Path) -> None:
    made = result(row(16, joint=OTHER))
    up, down = made.export("sglang", tmp_path / "s")
    assert json.loads(up.read_text()) == {"16": CONFIG.to_dict()}
    assert json.loads(down.read_text()) == {"16": OTHER.to_dict()}
    (path,) = made.export("vllm", tmp_path / "v")
    assert json.loads(path.read_text())["16"] == OTHER.to_dict()


def test_vllm_needs_a_config_timed_for_both(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="tune with --mode joint"):
        result(row(16)).export("vllm", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_exported_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="nothing to export"):
        result().export("sglang", tmp_path)


def test_rows_for_a_table() -> None:
    rows = result(row(16)).to_rows()
    assert [(r["batch_size"], r["role"], r["us"], r["BLOCK_SIZE_N"]) for r in rows] == [
        (16, "up", 8.0, 64),
        (16, "down", 4.0, 32),
    ]


def test_a_result_without_a_database_has_no_studies() -> None:
    with pytest.raises(InvalidInputError, match="no study database"):
        result(row(16)).study("up", 16)


def test_the_report_is_one_page_that_escapes(tmp_path: Path) -> None:
    path = result(row(16), row(64)).report(tmp_path / "deep" / "r.html")
    page = path.read_text(encoding="utf-8")
    assert "a &lt;note&gt;" in page and "a <note>" not in page
    assert "3.33x" in page
    assert 'src="http' not in page, "the page needs a network"


def test_figures_hold_the_numbers() -> None:
    made = result(row(16), row(64))
    traces = {trace.name: list(trace.y) for trace in latency_figure(made).data}
    assert traces["tuned, both"] == [12.0, 12.0]
    assert traces["engine's default"] == [40.0, 40.0]
    figure = speedup_figure(made)
    assert figure is not None and list(figure.data[0].y) == [pytest.approx(40 / 12)] * 2
    assert speedup_figure(result(row(16, default=None))) is None
