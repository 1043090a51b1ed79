"""The GPU process imports an engine where its package imports, and loads the kernel file alone where it does not."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.kernels.engine import _IMPORTED
from moeopt.kernels.sglang import SglangKernel
from moeopt.kernels.target import cross_target
from moeopt.kernels.vllm import VllmKernel
from tests.kernels import tiny_engine
from tests.wheels import SGLANG, VLLM, engine_source

SHAPE = MoEShape(8, 2, 64, 32)
CONFIG = LaunchConfig(16, 32, 64, 1, 4, 3)
OLD = engines.get("sglang").kernel.paths[-1]
UTILS = """
import functools
def is_cuda(): return True
def is_sm90_supported(): raise RuntimeError("no GPU to ask")
def rounded(size): return size + 1
"""
SERVER = """
class Server:
    @property
    def args(self): raise ValueError("server args are not set")
server = Server()
"""
ENVS = "class SLOW:\n    get = staticmethod(lambda: False)\n"
BASE = """
class Base:
    def __class_getitem__(cls, item): return cls
def register(what):
    return what if callable(what) else lambda function: function
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No engine is installed or imported, before and after."""

    def forget() -> None:
        _IMPORTED.clear()
        for name in [n for n in sys.modules if n.split(".")[0] in engines.names()]:
            del sys.modules[name]
        importlib.invalidate_caches()

    for spec in engines.every():
        monkeypatch.delenv(spec.kernel.variable, raising=False)
    forget()
    yield
    forget()


def package(root: Path, *changes: tuple[str, str]) -> Path:
    """A small engine that can be imported; returns its kernel file."""
    served = ('raise RuntimeError("no launch is made of a class")', "pass")
    path = tiny_engine.write((root / "sglang" / OLD).parent, served, *changes)
    for folder in path.relative_to(root).parents[:-1]:
        (root / folder / "__init__.py").touch()
    for name, text in (("utils.py", UTILS), ("envs.py", ENVS), ("base.py", BASE)):
        (root / "sglang" / "srt" / name).write_text(text)
    return path


def test_an_engine_that_imports_is_launched_through_its_own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A call that only the engine itself can answer, and that the file alone has no stand-in for.
    package(tmp_path, ("return is_sm90_supported() and", "return is_sm90_supported() and rounded(0) == 1 and"))
    monkeypatch.syspath_prepend(tmp_path)
    kernel = SglangKernel()
    assert "sglang" not in sys.modules
    said = kernel.load(SHAPE)
    assert said.endswith("imported as sglang.srt.layers.moe.fused_moe_triton.fused_moe_triton_kernels")
    module = sys.modules["sglang.srt.layers.moe.fused_moe_triton.fused_moe_triton_kernels"]
    launch = kernel.meta_launch(SHAPE, "up", 4, CONFIG, (9, 0))
    assert launch.kernel is module.fused_moe_kernel
    # Asked of the compute capability that is launched on, not of the machine.
    assert launch.named()["swap_ab"] is True
    assert kernel.meta_launch(SHAPE, "up", 4, CONFIG, (12, 0)).named()["swap_ab"] is False
    # The engine itself is as it was.
    assert module.swapped.__wrapped__.__globals__ is vars(module)
    with pytest.raises(RuntimeError, match="no GPU"):
        module.swapped(16)
    assert kernel.load(SHAPE) == said


def test_both_ways_have_the_same_launch_and_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    kernel = SglangKernel()
    alone = kernel.meta_launch(SHAPE, "up", 4, CONFIG, (9, 0))
    with cross_target((9, 0)):
        assert kernel.compile(SHAPE, "up", 4, CONFIG).compile_s > 0
    kernel.load(SHAPE)
    imported = kernel.meta_launch(SHAPE, "up", 4, CONFIG, (9, 0))
    assert imported.kernel is not alone.kernel
    assert (imported.grid, imported.specialisation()) == (alone.grid, alone.specialisation())
    with cross_target((9, 0)):
        assert kernel.compile(SHAPE, "up", 4, CONFIG).compile_s == 0


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "OSError: libcudart"),
        ("raise SystemExit('no driver')", "SystemExit: no driver"),
    ],
)
def test_an_engine_that_does_not_import_is_loaded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str, reason: str
) -> None:
    path = package(tmp_path)
    (tmp_path / "sglang" / "__init__.py").write_text(breaks + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    kernel = SglangKernel()
    said = kernel.load(SHAPE)
    assert "loaded alone" in said and reason in said and "\n" not in said
    assert kernel.meta_launch(SHAPE, "up", 4, CONFIG, (9, 0)).named()["swap_ab"] is True
    assert kernel.source.path == path.resolve()


def test_an_engine_whose_launch_asks_its_server_is_loaded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = package(
        tmp_path,
        ("import is_cuda,", "import server, is_cuda,"),
        ("return is_sm90_supported() and", "return is_sm90_supported() and not server.args and"),
    )
    utils = path.parents[3] / "utils.py"
    utils.write_text(f"{utils.read_text()}{SERVER}")
    monkeypatch.syspath_prepend(tmp_path)
    kernel = SglangKernel()
    said = kernel.load(SHAPE)
    assert "loaded alone" in said and "server args are not set" in said
    assert not _IMPORTED
    assert kernel.meta_launch(SHAPE, "up", 4, CONFIG, (9, 0)).named()["swap_ab"] is True


def test_a_file_that_is_named_is_loaded_alone(tmp_path: Path) -> None:
    kernel = SglangKernel(tiny_engine.write(tmp_path))
    assert "loaded alone (it was named by its path)" in kernel.load(SHAPE)
    assert not _IMPORTED


def test_another_package_of_that_name_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path / "one")
    package(tmp_path / "other")
    monkeypatch.syspath_prepend(tmp_path / "one")
    kernel = SglangKernel()
    monkeypatch.syspath_prepend(tmp_path / "other")
    importlib.invalidate_caches()
    assert "loaded alone" in kernel.load(SHAPE)


PROBE = """
import json, sys
from moeopt.kernels import get_kernel
kernel = get_kernel("auto", engine=sys.argv[1])
from moeopt.core.shape import MoEShape
from moeopt.core.config import LaunchConfig
shape = MoEShape(32, 4, 256, 128)
said = kernel.load(shape)
launch = kernel.meta_launch(shape, "up", 4, LaunchConfig(32, 64, 64, 8, 4, 3), (9, 0))
print(json.dumps([kernel.key.name, kernel.key.version, said, launch.specialisation()]))
"""


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "version", "kind"), [("sglang", SGLANG, SglangKernel), ("vllm", VLLM, VllmKernel)])
def test_published_engines_without_what_they_need(engine: str, version: str, kind: type) -> None:
    """As on a GPU machine that has the package but not its requirements: told, and launched all the same."""
    tree = engine_source(engine, version)
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tree)!r})\n{PROBE}", engine],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    name, found, said, specialisation = json.loads(run.stdout.splitlines()[-1])
    assert (name, found) == (engine, version)
    assert "loaded alone" in said or f"imported as {engine}." in said
    alone = kind(tree).meta_launch(
        MoEShape(32, 4, 256, 128), "up", 4, LaunchConfig(32, 64, 64, 8, 4, 3), (9, 0)
    )  # fmt: skip
    assert alone.specialisation() == specialisation
