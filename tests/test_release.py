"""What is published: sdist and wheel, and an installed moeopt away from its sources.

On the Pythons that MOEOPT_TEST_PYTHONS names (paths, separated by commas; by default the one that runs the tests).
Others than that one get no torch, whose wheels bring gigabytes: what runs here needs none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import moeopt

ROOT = Path(__file__).parents[1]
PYTHONS = os.environ.get("MOEOPT_TEST_PYTHONS", sys.executable).split(",")
LEFT_OUT = shutil.ignore_patterns(".*", "site", "build", "dist", "*.egg-info", "__pycache__", "*.db*")
RECORDED = "recorded:h200-E256-top8-K3072-N256-bf16.jsonl.gz"
SHAPE = ["--experts", "256", "--top-k", "8", "--hidden", "3072", "--intermediate", "256", "--dtype", "bf16"]

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an sdist, and a wheel that was built from it."""
    work = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, work / "source", symlinks=True, ignore=LEFT_OUT)
    subprocess.run([sys.executable, "-m", "build", "-o", work / "dist", work / "source"], check=True, timeout=500)
    return work / "dist"


def wheel_of(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def test_the_metadata_is_good(built: Path) -> None:
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()], check=True)


def test_the_wheel_is_pure_and_holds_what_is_needed(built: Path) -> None:
    wheel = wheel_of(built)
    assert wheel.name == f"moeopt-{moeopt.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 4_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"moeopt", f"moeopt-{moeopt.__version__}.dist-info"}
    for path in (ROOT / "moeopt").rglob("*"):
        if path.suffix in (".py", ".npz", ".typed"):
            assert str(path.relative_to(ROOT)) in names
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_the_sdist_holds_its_papers(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith(("tests", "studies"))]


@pytest.fixture(scope="module", params=PYTHONS, ids=lambda path: Path(path).parts[-3])
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The programs of an environment that holds the wheel, and what it requires, alone."""
    where, wheel = tmp_path_factory.mktemp("environment"), wheel_of(built)
    subprocess.run([request.param, "-m", "venv", where], check=True)
    pip = [where / "bin" / "python", "-m", "pip", "install", "-q"]
    if request.param != sys.executable:
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
            fields = archive.read(metadata).decode().splitlines()
        required = [
            line.partition(": ")[2] for line in fields if line.startswith("Requires-Dist") and "extra" not in line
        ]
        subprocess.run([*pip, *(one for one in required if not one.startswith("torch"))], check=True, timeout=580)
        pip.append("--no-deps")
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", wheel], check=True, timeout=580)
    return where / "bin"


Moeopt = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Moeopt:
    """Runs ``moeopt ARGS`` in an empty directory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        command = [installed / "moeopt", *args]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    return call


def test_the_installed_command_tunes_plans_and_looks(run: Moeopt) -> None:
    for command in (
        ["tune", "--gpu", RECORDED, "--batch-sizes", "16,64", "--export", "sglang:out", "--report", "r.html"],
        ["plan", *SHAPE, "--gpu", "NVIDIA RTX PRO 6000 Blackwell Server Edition"],
        ["doctor", "--config-dir", "out", *SHAPE, "--gpu", "NVIDIA H200", "--triton", "3.6.0"],
        ["suggest", *SHAPE, "--gpu", "NVIDIA H200", "suggested"],
        ["status"],
        ["--version"],
        [],
    ):
        done = run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["dashboard"], "pip install 'moeopt[dashboard]'"),
        (["tune", "--gpu", RECORDED, "--storage", "postgresql://u@127.0.0.1:1/d"], "pip install 'moeopt[postgres]'"),
        (["tune", "--gpu", RECORDED, "--storage", "mysql://u@127.0.0.1:1/d"], "pip install 'moeopt[mysql]'"),
        (["tune", *SHAPE, "--executor", "ray"], "pip install 'moeopt[ray]'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_missing_extra_is_one_line_before_any_work(
    run: Moeopt, tmp_path: Path, command: list[str], said: str
) -> None:
    if command == ["dashboard"]:
        run("tune", "--gpu", RECORDED, "--batch-sizes", "16", "--trials", "4")
    done = run(*command)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert "timed now" not in done.stdout
