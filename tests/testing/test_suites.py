"""The suites themselves: the example of their docstring passes, and a part that breaks its contract does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moeopt.testing import suites

ROOT = Path(__file__).parents[2]
EXAMPLE = textwrap.dedent((suites.__doc__ or "").split("whole::", 1)[1])
# What a device may do wrong, and the tests that find it.
BROKEN = {
    ("yield Measurement(job, status", "yield Measurement(job, 'ok', us=(1.0,)); yield Measurement(job, status"): {
        "test_every_job_is_answered_once", "test_closing_drops_the_rest_and_the_device_goes_on",
    },
    ("if race(job, us):", "if race(job, us) and False:"): {
        "test_the_race_is_asked_here_after_each_round_and_honoured",
    },
    ("for job in jobs:", "for job in jobs[:4]:"): {
        "test_every_job_is_answered_once", "test_times_repeat_and_joint_ones_are_sums",
        "test_the_race_is_asked_here_after_each_round_and_honoured",
    },
    ("if not self.spec.candidates([job.config]):", "if False:"): {"test_what_fails_is_a_value"},
    ('"made up"', '"made\\nup"'): {"test_its_spec_is_consistent"},
}  # fmt: skip


def run_pytest(folder: Path, *names: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "-p", "no:xdist", *names]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    return done.stdout


@pytest.mark.slow
def test_the_example_passes_and_what_breaks_the_contract_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(EXAMPLE, encoding="utf-8")
    for number, change in enumerate(BROKEN):
        assert change[0] in EXAMPLE
        (tmp_path / f"test_broken{number}.py").write_text(EXAMPLE.replace(*change), encoding="utf-8")
    output = run_pytest(tmp_path)
    failed = re.findall(r"FAILED test_(\w+)\.py::TestRowsDevice::(\w+)", output)
    assert " passed" in output and not [test for name, test in failed if name == "example"], output
    for number, expected in enumerate(BROKEN.values()):
        assert expected <= {test for name, test in failed if name == f"broken{number}"}, output


def test_without_pytest_there_is_one_line_that_says_so() -> None:
    code = "import sys; sys.modules['pytest'] = None; import moeopt.testing.faults, moeopt.testing.suites"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = "ImportError: moeopt.testing.suites needs pytest: pip install 'moeopt[testing]'"
    assert done.stderr.splitlines()[-1] == said
