"""What ``import moeopt`` brings along."""

from __future__ import annotations

import subprocess
import sys

import moeopt


def test_import_brings_neither_torch_nor_triton_nor_plotly() -> None:
    code = "import sys, moeopt; print([m for m in ('torch', 'triton', 'plotly', 'pandas', 'ray') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_all_public_names_are_there() -> None:
    assert sorted(moeopt.__all__) == sorted(set(moeopt.__all__))
    assert all(hasattr(moeopt, name) for name in moeopt.__all__)


def test_the_process_that_searches_needs_no_torch() -> None:
    """Torch takes seconds to import: only the GPU worker and the compile processes pay for it."""
    code = (
        "import sys, moeopt.measure.cuda, moeopt.compile, moeopt.tuning.tuner\n"
        "from moeopt import GpuSpec, MoEShape\n"
        "from moeopt.kernels import get_kernel\n"
        "kernel, shape, gpu = get_kernel('builtin'), MoEShape(8, 2, 256, 128), GpuSpec.by_name('H200')\n"
        "kernel.check(shape, gpu)\n"
        "assert kernel.illegal_reason(kernel.default_config(shape, 'up', 4, gpu), shape, 'up', gpu) is None\n"
        "print(kernel.key.source_hash, [m for m in ('torch', 'triton') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split(maxsplit=1)[1].strip() == "[]"
