"""The dashboard: notes, plots, and the pages in a real browser."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest

from moeopt.core.trial import Cell
from moeopt.errors import InvalidInputError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.report.dashboard import annotate, get_note, serve
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner

ARTIFACTS = Path(__file__).parents[2] / "test-artifacts"
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, tiny_recording: Callable[..., Path]) -> Iterator[StudyStore]:
    """A database with a finished tune."""
    with StudyStore(tmp_path / "studies.db") as store:
        device = RecordedDevice(Recording.load(tiny_recording()))
        Tuner(device, store, TuneOptions(batch_sizes=(1, 16, 64), trials=20, seed=1)).run()
    with StudyStore(tmp_path / "studies.db") as store:
        yield store


def _study(store: StudyStore, cell: Cell) -> optuna.Study:
    return store.optuna_study(store.keys()[0].key, cell)


def _note(study: optuna.Study) -> str:
    return get_note(study._storage.get_study_system_attrs(study._study_id))


def test_notes_say_what_a_study_is(store: StudyStore) -> None:
    assert annotate(store) == 6
    text = _note(_study(store, Cell("up", 1)))
    for expected in (
        "Gate and up projection, 1 token",
        "E8-top2-K256-N128-bf16 on **NVIDIA H200** (replayed",
        "x** the engine's default (",
        " %** of the roofline (",
        " raced out",
        " compile)",
        "| triton | 3.6.0 |",
    ):
        assert expected in text, text
    assert annotate(store) == 0, "nothing has changed"


def test_every_trial_has_what_a_person_wants_to_see(store: StudyStore) -> None:
    for study in (_study(store, cell) for cell in (Cell("up", 1), Cell("down", 64))):
        for trial in study.trials:
            assert ("reason" in trial.user_attrs) == (trial.state.name != "COMPLETE")
            assert trial.system_attrs["constraints"] == [0.0 if trial.intermediate_values else 1.0]
            if trial.intermediate_values:
                assert set(trial.user_attrs) >= {
                    "µs per round", "TFLOP/s", "GB/s", "fraction of roofline", "registers", "spills", "shared bytes",
                    "compile s", "relative error",
                }  # fmt: skip
                assert trial.user_attrs["µs per round"] == list(trial.intermediate_values.values())
            assert all(len(json.dumps(value)) < 2045 for value in trial.user_attrs.values())


def test_a_note_that_a_person_edited_is_kept(store: StudyStore) -> None:
    from optuna_dashboard import save_note

    annotate(store)
    study = _study(store, Cell("up", 16))
    save_note(study, "mine")
    study.add_trial(study.trials[0])
    annotate(store)
    assert _note(study) == "mine"


def test_the_api_serves_plots_and_constraints(store: StudyStore) -> None:
    annotate(store)
    with serve(store, 0) as address:
        base = address.removesuffix("/dashboard")
        with urllib.request.urlopen(f"{base}/api/studies") as answer:
            names = [study["study_name"] for study in json.load(answer)["study_summaries"]]
        assert len(names) == 6
        assert names == sorted(names, key=lambda name: (int(name.split("M=")[1][:5]), " down " in name))
        study = _study(store, Cell("up", 64))
        with urllib.request.urlopen(f"{base}/api/studies/{study._study_id}?after=0") as answer:
            detail = json.load(answer)
        plots = {plot["id"]: json.loads(plot["graph_object"]) for plot in detail["plotly_graph_objects"]}
        assert set(plots) == {"moeopt-latency", "moeopt-speedup"}
        assert plots["moeopt-latency"]["data"][0]["x"] == [1, 16, 64]
        assert any(max(trial["constraints"]) > 0 for trial in detail["trials"]) == any(
            "compile" in trial.user_attrs.get("reason", "") for trial in study.trials
        )
        with pytest.raises(InvalidInputError, match="cannot listen on port"), serve(store, int(base.split(":")[2])):
            pass


@pytest.mark.browser
@pytest.mark.slow
def test_pages_in_a_browser(store: StudyStore) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or "/usr/bin/chromium"
    annotate(store)
    ARTIFACTS.mkdir(exist_ok=True)
    study = _study(store, Cell("up", 64))
    with serve(store, 0) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1500})
        page.set_default_timeout(60_000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))

        page.goto(address)
        page.get_by_text("| up | M=00064").first.wait_for()
        page.get_by_text("| down | M=00001").first.wait_for()
        page.screenshot(path=ARTIFACTS / "dashboard-studies.png")

        page.get_by_text("| up | M=00064").first.click()
        page.get_by_role("heading", name="History").wait_for()
        page.locator(".js-plotly-plot .scatterlayer .point").first.wait_for(state="attached")
        page.locator(".js-plotly-plot", has_text="num_stages").first.wait_for()  # importance of each parameter
        page.locator("[id='user-defined-plot:moeopt-latency'] .main-svg").first.wait_for(state="attached")
        page.locator("[id='user-defined-plot:moeopt-speedup'] .main-svg").first.wait_for(state="attached")
        page.screenshot(path=ARTIFACTS / "dashboard-study.png", full_page=True)

        page.goto(f"{address}/studies/{study._study_id}/note")
        page.get_by_text("Gate and up projection, 64 tokens").wait_for()
        page.get_by_text("of the roofline (").wait_for()
        page.screenshot(path=ARTIFACTS / "dashboard-note.png")

        page.goto(f"{address}/studies/{study._study_id}/trials")
        page.get_by_text("fraction of roofline").first.wait_for()
        page.screenshot(path=ARTIFACTS / "dashboard-trials.png")
        browser.close()
    assert errors == []
