"""The HTML report: what it counts, what it draws, and how it looks in a browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import moeopt
from moeopt.core.trial import Cell
from moeopt.report.figures import landscape_chart, latency_chart, regret_chart, relative_chart
from moeopt.result import TuneResult
from moeopt.storage.store import StudyStore

from .test_dashboard import ARTIFACTS, CHROMIUM_FLAGS


@pytest.fixture
def tuned(tmp_path: Path, tiny_recording: Callable[..., Path]) -> TuneResult:
    """The second of two runs, which timed only what the first had not."""
    gpu, storage = f"recorded:{tiny_recording()}", str(tmp_path / "x.db")
    moeopt.tune(gpu=gpu, trials=8, storage=storage, progress=False)
    return moeopt.tune(gpu=gpu, trials=12, storage=storage, progress=False)


def test_it_counts_all_runs_of_the_study(tuned: TuneResult, tmp_path: Path) -> None:
    page = tuned.report(tmp_path / "r.html").read_text(encoding="utf-8")
    facts = dict(re.findall(r'<th class="l name">([^<]*)</th><td class="l text">([^<]*)</td>', page))
    assert int(facts["trials"]) == tuned.counts.measured + tuned.counts.failed + tuned.counts.resumed
    assert int(facts["trials"]) > tuned.counts.measured + tuned.counts.failed
    assert int(facts["timed in full"]) + int(facts["raced out"]) + int(facts["failed"]) == int(facts["trials"])
    assert [v for k, v in facts.items() if k.startswith("run ")] == [
        f"grid space, {n} trials, seed 0, 3 batch sizes: finished" for n in (8, 12)
    ]
    if int(facts["failed"]):
        assert "failed: compile" in page


def test_it_is_small_and_needs_nothing_else(tuned: TuneResult, tmp_path: Path) -> None:
    path = tuned.report(tmp_path / "r.html")
    page = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 200_000
    assert "<script" not in page
    assert [url for url in re.findall(r"https?://[^\"' ]+", page) if "w3.org" not in url] == []
    assert page.count('<svg class="c"') == 4


def test_a_loaded_result_reports_the_same(tuned: TuneResult, tmp_path: Path) -> None:
    made = tuned.report(tmp_path / "a.html").read_text(encoding="utf-8")
    loaded = moeopt.load(str(tmp_path / "x.db")).report(tmp_path / "b.html").read_text(encoding="utf-8")
    assert made == loaded


def test_without_its_database_it_is_of_the_run_alone(
    tuned: TuneResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.db").unlink()
    page = tuned.report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<h2>The run</h2>" in page and "All runs" not in page
    assert page.count('<svg class="c"') == 2
    assert "x.db" in caplog.text


def test_charts_hold_the_numbers(tuned: TuneResult) -> None:
    series = {one.name: list(one.points) for one in latency_chart(tuned).series}
    assert series["tuned"] == [(m, tuned.best(m).total_us) for m in (1, 16, 64)]
    assert series["roofline"] == [(m, tuned.best(m).roofline_us) for m in (1, 16, 64)]
    over = {one.name: [y for _, y in one.points] for one in relative_chart(tuned).series}
    assert over["tuned"] == [1.0] * 3
    assert over["roofline"] == [pytest.approx(tuned.best(m).roofline_fraction) for m in (1, 16, 64)]


def test_regret_falls_to_the_best_and_the_landscape_holds_what_was_timed_for_both(tuned: TuneResult) -> None:
    assert tuned.storage is not None and tuned.key is not None
    with StudyStore(tuned.storage) as store:
        trials = store.load(tuned.key, store.cells(tuned.key))
    chart = regret_chart(trials)
    assert chart is not None
    for one in chart.series:
        values = [y for _, y in one.points]
        assert values == sorted(values, reverse=True) and values[-1] == 0.1
    landscape = landscape_chart(tuned, trials)
    assert landscape is not None
    timed = {cell: {t.measurement.job.config for t in found if t.measurement.us} for cell, found in trials.items()}
    both = sum(len(timed[Cell("up", m)] & timed[Cell("down", m)]) for m in (1, 16, 64))
    assert sum(len(one.points) for one in landscape.series) == both


def test_a_joint_tune_has_no_landscape(tmp_path: Path, tiny_recording: Callable[..., Path]) -> None:
    joint = moeopt.tune(
        gpu=f"recorded:{tiny_recording()}", trials=6, mode="joint", storage=str(tmp_path / "j.db"), progress=False
    )
    page = joint.report(tmp_path / "j.html").read_text(encoding="utf-8")
    assert "Landscape" not in page and page.count('<svg class="c"') == 3


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser(tuned: TuneResult, tmp_path: Path, width: int, scheme: str) -> None:
    from playwright.sync_api import sync_playwright

    path = tuned.report(tmp_path / "r.html")
    ARTIFACTS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or "/usr/bin/chromium"
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(path.as_uri())
        page.screenshot(path=ARTIFACTS / f"report-{scheme}-{width}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        seen = "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
        ink, paper = page.eval_on_selector("body", seen)
        brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
        assert (brightness[0] > brightness[1]) == (scheme == "dark")
        for chart in page.query_selector_all("svg.c"):
            box = chart.bounding_box()
            assert box is not None and box["height"] > 200
        browser.close()
