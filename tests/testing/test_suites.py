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


KERNEL = """
from dataclasses import replace
import pytest
from moeopt.core.gpu import GpuSpec
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.testing.suites import KernelTestCase


class Mine(BuiltinKernel):
    {body}


class TestMine(KernelTestCase):
    @pytest.fixture
    def make_kernel(self):
        return Mine

    @pytest.fixture
    def shapes(self):
        return [MoEShape(4, 2, 96, 64)]

    @pytest.fixture
    def configs(self):
        return [LaunchConfig(16, 32, 32, 1, 4, 3)]

    @pytest.fixture
    def gpu(self):
        return GpuSpec.by_name("H200")

    @pytest.fixture
    def device(self):
        return "cpu"
"""
# What a kernel may do wrong, and the test that finds it; the first does nothing wrong.
BROKEN_KERNELS = {
    "pass": None,
    "__reduce__ = lambda self: (int, ())": "test_it_travels_and_its_key_is_stable",
    "default_config = lambda self, *_: LaunchConfig(256, 256, 256, 1, 4, 5)": "test_the_default_config_is_legal",
    "illegal_reason = lambda self, *_: None": "test_what_cannot_run_has_a_reason_of_one_line",
    "compile = lambda self, *given: replace(BuiltinKernel.compile(self, *given), compile_s=1.0)": (
        "test_a_legal_config_compiles_once_for_each_specialisation"
    ),
    "bind = lambda self, layer, role, batch, config, out: lambda: out.fill_(1)": (
        "test_its_results_are_right_and_come_again"
    ),
}


@pytest.mark.slow
def test_a_kernel_that_breaks_the_contract_is_found(tmp_path: Path) -> None:
    for number, body in enumerate(BROKEN_KERNELS):
        (tmp_path / f"test_kernel{number}.py").write_text(KERNEL.replace("{body}", body), encoding="utf-8")
    output = run_pytest(tmp_path)
    failed = dict(re.findall(r"FAILED test_kernel(\d)\.py::TestMine::(\w+)", output))
    assert failed == {str(n): test for n, test in enumerate(BROKEN_KERNELS.values()) if test is not None}, output


def test_without_pytest_there_is_one_line_that_says_so() -> None:
    code = "import sys; sys.modules['pytest'] = None; import moeopt.testing.faults, moeopt.testing.suites"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = "ImportError: moeopt.testing.suites needs pytest: pip install 'moeopt[testing]'"
    assert done.stderr.splitlines()[-1] == said
