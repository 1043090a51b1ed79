"""Loading a kernel file without the rest of its engine."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from moeopt.engines.module import EngineModule, StandIn, UnknownCallError
from moeopt.errors import UnsupportedShapeError
from tests.kernels import tiny_engine


def load(path: Path) -> EngineModule:
    return EngineModule(path, "sglang", {"is_cuda": lambda: True, "is_sm90_supported": lambda: True})


def test_nothing_stays_behind(tmp_path: Path) -> None:
    before = set(sys.modules)
    module = load(tiny_engine.write(tmp_path))
    assert module.get("fused_moe_kernel").arg_names[0] == "a_ptr"
    assert not any(name.startswith("sglang") for name in set(sys.modules) - before)
    # A package of that name that comes later is the real one.
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("REAL = True\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import sglang

        assert sglang.REAL
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("sglang", None)


def test_given_names_and_the_rest(tmp_path: Path) -> None:
    module = load(tiny_engine.write(tmp_path))
    assert module.names["_fast"] is True
    assert isinstance(module.names["_limit"], StandIn)
    assert module.get("_limit") is None
    assert not module.names["_limit"]
    assert "Served" not in module.names


def test_answers_are_not_cached_across_gpus(tmp_path: Path) -> None:
    answers = [True, False]
    module = EngineModule(tiny_engine.write(tmp_path), "sglang", {"is_sm90_supported": lambda: answers.pop(0)})
    assert module.get("swapped")(16) is True
    assert module.get("swapped")(16) is False


def test_unknown_call_is_named(tmp_path: Path) -> None:
    path = tiny_engine.write(tmp_path, ("return is_sm90_supported() and", "return rounded(block_m) and"))
    module = load(path)
    with pytest.raises(UnknownCallError, match=r"sglang\.srt\.utils\.rounded"):
        module.get("swapped")(16)


def test_kernel_keeps_its_source_and_line(tmp_path: Path) -> None:
    path = tiny_engine.write(tmp_path)
    lines, start = inspect.getsourcelines(load(path).get("fused_moe_kernel").fn)
    assert path.read_text().splitlines(keepends=True)[start - 1 : start - 1 + len(lines)] == lines
    assert lines[1].startswith("def fused_moe_kernel(")


@pytest.mark.parametrize(
    ("old", "new"), [("_limit = rounded(64)", "_limit = undefined(64)"), ("_limit = rounded(64)", "_limit = = 64")]
)
def test_file_that_does_not_load(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=r"cannot be loaded.*(undefined|invalid syntax)"):
        load(tiny_engine.write(tmp_path, (old, new)))
