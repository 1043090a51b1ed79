"""The cache that ``moeopt compile`` fills on a build machine serves another machine: nothing is compiled there.

What a tune does with its compile pool, on a CPU: the same pool, kernel, shape and capability, and Triton's
cache at another path. A binary that had to be compiled would be a new file in the cache.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moeopt.cli import build_app
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.space import SearchSpace
from moeopt.kernels import get_kernel
from moeopt.measure.cuda import local_pool
from moeopt.measure.options import DeviceOptions

pytestmark = pytest.mark.slow

RTX_PRO = GpuSpec.by_name("NVIDIA RTX PRO 6000 Blackwell Server Edition")
SHAPE = MoEShape(8, 2, 512, 256)
FEW = {
    "BLOCK_SIZE_M": (16, 64),
    "BLOCK_SIZE_N": (32,),
    "BLOCK_SIZE_K": (64,),
    "GROUP_SIZE_M": (1, 16),
    "num_warps": (4,),
    "num_stages": (2,),
}


def binaries(cache: Path) -> set[Path]:
    return {path.relative_to(cache) for path in cache.rglob("*.cubin")}


def test_a_pool_with_a_shipped_cache_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SearchSpace, "named", classmethod(lambda cls, name, shape, **_: cls("few", FEW)))
    built, shipped = tmp_path / "built", tmp_path / "other" / "shipped"
    args = [
        "compile", "--experts", "8", "--top-k", "2", "--hidden", "512", "--intermediate", "256", "--dtype", "bf16",
        "--gpu", RTX_PRO.name, "--out", str(tmp_path / "few.jsonl.gz"), "--cache-dir", str(built), "--workers", "1",
    ]  # fmt: skip
    done = CliRunner().invoke(build_app(), args)
    assert done.exit_code == 0, done.output
    shutil.copytree(built, shipped)
    shutil.rmtree(built)
    before = binaries(shipped)
    assert len(before) == 2 * len(SearchSpace("few", FEW)) == 8

    # As tune does it on the GPU machine, where TRITON_CACHE_DIR names the shipped directory.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shipped))
    with local_pool(SHAPE, RTX_PRO, get_kernel("builtin"), DeviceOptions(kernel="builtin", workers=1)) as pool:
        for config in SearchSpace("few", FEW).configs():
            for role in ROLES:
                for m in (1, 64, 4096):
                    compiled = pool.submit(config, role, m).result(300)
                    assert compiled.failure is None
                    assert all(Path(path).is_relative_to(shipped) for path in compiled.files.values())
        assert binaries(shipped) == before
        # And it would have been seen.
        assert pool.submit(LaunchConfig(32, 32, 64, 1, 4, 2), "up", 64).result(300).failure is None
        assert len(binaries(shipped)) == len(before) + 1
