"""Published engines, fetched by pip at test time, to check against what they really do."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "engines"
SGLANG = "0.5.23"
VLLM = "0.33.0"
# The adapters' tests run on both ends of the range. In between, all of them passed on SGLang 0.5.9 and 0.5.15 and
# on vLLM 0.17.1 and 0.25.1 (30 November 2026): MOEOPT_TEST_SGLANG=0.5.9,0.5.15 MOEOPT_TEST_VLLM=0.17.1,0.25.1.
SGLANG_VERSIONS = tuple(os.environ.get("MOEOPT_TEST_SGLANG", f"0.5.5,{SGLANG}").split(","))
VLLM_VERSIONS = tuple(os.environ.get("MOEOPT_TEST_VLLM", f"0.11.2,{VLLM}").split(","))
# The wheels' tags, so that the same file comes whatever Python runs the tests.
_TAGS = {
    "sglang": ("--platform", "manylinux_2_34_x86_64", "--abi", "cp311"),
    "vllm": (
        *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_31_x86_64"),
        *("--platform", "manylinux1_x86_64", "--abi", "abi3"),
    ),
}


def engine_source(name: str, version: str) -> Path:
    """The Python and JSON files of a published engine, unpacked: the folder that holds the package.

    Fetched once (SGLang 39 MB, vLLM 336 MB; the wheel itself is not kept) and reused from then on,
    also by tests that run at the same time.

    Args:
        name: ``sglang`` or ``vllm``.
        version: The release, such as ``0.5.23``.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    tree = CACHE / f"{name}-{version}"
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                unpacked = Path(scratch) / "tree"
                _unpack(_wheel(name, version, Path(scratch)), unpacked)
                shutil.move(unpacked, tree)
    return tree


def _wheel(name: str, version: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.11", "--implementation", "cp", *_TAGS[name]]
    subprocess.run([*command, "-d", str(scratch), f"{name}=={version}"], check=True, timeout=580)
    return next(scratch.glob("*.whl"))


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.endswith((".py", ".json")):
                archive.extract(member, target)
