"""Finding an engine's kernel file, without importing the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moeopt import engines
from moeopt.engines.source import find_engine
from moeopt.errors import DeviceError, InvalidInputError
from moeopt.kernels import get_kernel
from tests.kernels import tiny_engine

PATHS = engines.get("sglang").kernel.paths
OLD, NEW = PATHS[-1], PATHS[0]


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variable is set, and no engine is installed."""
    for spec in engines.every():
        monkeypatch.delenv(spec.kernel.variable, raising=False)


def package(root: Path, relative: str = OLD) -> Path:
    """An engine's package that cannot be imported, with its kernel file."""
    path = tiny_engine.write((root / "sglang" / relative).parent, name=Path(relative).name)
    (root / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return path


@pytest.mark.parametrize("relative", PATHS)
def test_installed_package_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str
) -> None:
    path = package(tmp_path, relative)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    assert find_engine("sglang").path == path.resolve()
    assert "sglang" not in set(sys.modules) - before


def test_a_kernel_that_moved_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = package(tmp_path, "srt/elsewhere/fused_moe_kernels.py")
    path.with_name("fused_moe_a.py").symlink_to("nowhere")
    path.with_name("fused_moe_b.py").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_engine("sglang").path == path.resolve()


@pytest.mark.parametrize("what", ["file", "tree", "package"])
def test_variable_comes_before_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    package(tmp_path / "installed")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    path = package(tmp_path / "named", NEW)
    named = {"file": path, "tree": tmp_path / "named", "package": tmp_path / "named" / "sglang"}[what]
    monkeypatch.setenv("MOEOPT_SGLANG_KERNEL", str(named))
    assert find_engine("sglang").path == path.resolve()


def test_absent_engine_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"MOEOPT_VLLM_KERNEL.*builtin"):
        find_engine("vllm")


def test_package_without_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match=r"holds no fused_moe_kernel where versions 0\.5\.5 to 0\.5\.23 have it"):
        find_engine("sglang")


@pytest.mark.parametrize("content", [None, "def other_kernel(): pass\n"])
def test_variable_that_holds_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    path = tmp_path / "kernels.py"
    if content:
        path.write_text(content)
    monkeypatch.setenv("MOEOPT_SGLANG_KERNEL", str(path))
    with pytest.raises(InvalidInputError, match=r"MOEOPT_SGLANG_KERNEL=.*kernels\.py holds no fused_moe_kernel"):
        find_engine("sglang")
    # A wrong variable is the user's mistake: auto does not pass over it.
    with pytest.raises(InvalidInputError, match="MOEOPT_SGLANG_KERNEL"):
        get_kernel("auto", engine="sglang")


def test_hash_is_of_the_source(tmp_path: Path) -> None:
    path = tiny_engine.write(tmp_path)
    first = find_engine("sglang", path).source_hash
    assert find_engine("sglang", path).source_hash == first
    assert len(first) == 16
    path.write_text(path.read_text() + "# changed\n")
    assert find_engine("sglang", path).source_hash != first


def test_version_of_an_unpacked_tree(tmp_path: Path) -> None:
    path = package(tmp_path)
    assert find_engine("sglang", path).version == ""
    (tmp_path / "sglang" / "version.py").write_text('__version__ = "0.5.9"\n')
    assert find_engine("sglang", path).version == "0.5.9"
    (tmp_path / "sglang-0.5.10.dist-info").mkdir()
    assert find_engine("sglang", tmp_path).version == "0.5.10"


def test_auto_takes_the_engine_the_export_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEOPT_SGLANG_KERNEL", str(package(tmp_path)))
    assert get_kernel("auto", engine="sglang").key.name == "sglang"
    assert get_kernel("auto", engine="vllm").key.name == "builtin"


def test_auto_warns_where_the_file_is_tuned_on_another_kernel(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        kernel = get_kernel("auto", engine="sglang")
    assert kernel.key.name == "builtin"
    assert "sglang" in caplog.text
    assert "own kernel" in caplog.text
