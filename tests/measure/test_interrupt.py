"""Ctrl-C and SIGTERM: what was measured is kept and exported, and no process is left."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

log = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
@pytest.mark.parametrize(("busy", "sign"), [("compiling", "calls"), ("timing", "timing")])
def test_a_run_that_is_interrupted(
    tiny_recording: Callable[..., Path], tmp_path: Path, busy: str, sign: str, how: signal.Signals
) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.measure.measure_interrupt", busy, str(tiny_recording()), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    children: list[psutil.Process] = []
    try:
        patience = time.monotonic() + 120
        while not (tmp_path / sign).exists():
            assert run.poll() is None and time.monotonic() < patience, run.communicate()
            time.sleep(0.1)
        children = psutil.Process(run.pid).children(recursive=True)
        assert children
        began = time.monotonic()
        # A terminal's Ctrl-C goes to the whole group.
        (os.killpg if how == signal.SIGINT else os.kill)(run.pid, how)
        out, err = run.communicate(timeout=30)
        log.info("%s, %s: ended after %.2f s", busy, how.name, time.monotonic() - began)
        assert run.returncode == 130, err
        assert "interrupted: these are the best so far; run the same command to go on" in " ".join(out.split())
        assert "Traceback" not in err
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
    finally:
        for child in [*children, psutil.Process(run.pid) if run.poll() is None else None]:
            if child is not None and child.is_running():
                child.kill()
    exported = sorted(path.name for path in (tmp_path / "out").rglob("*.json"))
    result = json.loads((tmp_path / "x.json").read_text())
    if busy == "compiling":
        assert exported == [] and result["batch_sizes"] == {}
        return
    assert exported and set(result["batch_sizes"]) <= {"16", "64"} and result["batch_sizes"]
    with sqlite3.connect(tmp_path / "x.db") as database:
        (stored,) = database.execute("SELECT count(*) FROM trials WHERE state = 'COMPLETE'").fetchone()
    assert stored == result["counts"]["measured"] > 0
