"""The Docker recipes, as far as they can be tried without a container: their install step keeps what an image pins."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_release import LEFT_OUT

from .pages import ROOT

RECIPES = sorted((ROOT / "examples" / "docker").glob("*.Dockerfile"))


def install_step(recipe: Path) -> str:
    """The shell command of its RUN instruction."""
    (run,) = re.findall(r"^RUN ((?:.*\\\n)*.*)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
    return str(run).replace("\\\n", " ")


def pretend(packages: Path, name: str, version: str, *requires: str) -> None:
    """Makes pip believe that a package is installed: the real ones are gigabytes."""
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text("")


def image(where: Path, torch: str, triton: str) -> tuple[Path, Path]:
    """An environment with an image's torch and Triton: its ``bin`` and its packages."""
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    (packages,) = (where / "lib").glob("python*/site-packages")
    pretend(packages, "torch", torch, f"triton=={triton}")
    pretend(packages, "triton", triton)
    return where / "bin", packages


def build(recipe: Path, bin_: Path, work: Path) -> subprocess.CompletedProcess[str]:
    """Runs the recipe's install step on this source."""
    step = install_step(recipe).replace("python3", str(bin_ / "python"))
    shutil.copytree(ROOT, work / "moeopt", symlinks=True, ignore=LEFT_OUT)
    step = step.replace("/opt/", f"{work}/")
    return subprocess.run(["bash", "-c", step], capture_output=True, text=True, check=False, timeout=580)


def test_there_is_one_for_each_engine_and_they_install_alike() -> None:
    assert [recipe.name for recipe in RECIPES] == ["sglang.Dockerfile", "vllm.Dockerfile"]
    assert len({install_step(recipe) for recipe in RECIPES}) == 1


@pytest.mark.slow
@pytest.mark.network
def test_torch_and_triton_stay_as_the_image_has_them(tmp_path: Path) -> None:
    """The pins are those that SGLang 0.5.23 requires, and torch's own of Triton."""
    bin_, packages = image(tmp_path / "image", "2.14.1+cu130", "3.8.0")
    done = build(RECIPES[0], bin_, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "pins.txt").read_text().split() == ["torch==2.14.1+cu130", "triton==3.8.0"]
    assert {path.name for path in packages.glob("t*-*.dist-info") if path.name.startswith(("torch-", "triton-"))} == {
        "torch-2.14.1+cu130.dist-info",
        "triton-3.8.0.dist-info",
    }
    assert list(packages.glob("moeopt-*.dist-info"))


@pytest.mark.slow
@pytest.mark.network
def test_an_image_that_is_too_old_is_left_as_it_was(tmp_path: Path) -> None:
    bin_, packages = image(tmp_path / "image", "2.6.0", "3.2.0")
    before = sorted(path.name for path in packages.iterdir())
    done = build(RECIPES[0], bin_, tmp_path)
    assert done.returncode != 0
    assert sorted(path.name for path in packages.iterdir()) == before
