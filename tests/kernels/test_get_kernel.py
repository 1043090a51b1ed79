"""Which kernel a name stands for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from moeopt.errors import DeviceError, InvalidInputError
from moeopt.kernels import get_kernel

STUB = "import triton\n\n\n@triton.jit\ndef fused_moe_kernel(\n    a_ptr,\n):\n    pass\n"


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MOEOPT_SGLANG_KERNEL", "MOEOPT_VLLM_KERNEL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("moeopt.engines.source._package_roots", lambda package: [])


def test_auto_is_ours_where_no_engine_is(caplog: pytest.LogCaptureFixture) -> None:
    assert get_kernel("builtin").key.name == "builtin"
    assert get_kernel().key.name == "builtin" and not caplog.records
    with caplog.at_level(logging.WARNING):
        assert get_kernel("auto", engine="sglang").key.name == "builtin"
    (record,) = caplog.records
    assert "moeopt's own kernel, not on the one of sglang that will read them" in record.getMessage()
    assert "no package 'sglang' is installed" in record.getMessage()


def test_auto_is_the_engine_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernel.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("MOEOPT_VLLM_KERNEL", str(tmp_path / "kernel.py"))
    assert get_kernel("auto", engine="vllm").key.name == "vllm"
    assert get_kernel("auto").key.name == "vllm"
    assert get_kernel("auto", engine="sglang").key.name == "builtin"


def test_a_named_engine_that_is_not_here_is_an_error() -> None:
    for name in ("sglang", "vllm"):
        with pytest.raises(DeviceError, match="builtin"):
            get_kernel(name)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="builtin, sglang, vllm, auto"):
        get_kernel("cutlass")
    with pytest.raises(InvalidInputError, match="'trt' is unknown: give sglang or vllm"):
        get_kernel("auto", engine="trt")
