"""The pool with the real compiler and no GPU."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moeopt.compile import CompilePool
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import shared_bytes
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.space import SearchSpace
from moeopt.errors import RecordingError
from moeopt.kernels import get_kernel
from moeopt.recordings.compile_sweep import CompileSweep
from moeopt.recordings.format import Recording

pytestmark = pytest.mark.slow

SHAPE = MoEShape(8, 2, 512, 256)
CONFIG = LaunchConfig(16, 64, 64, 1, 4, 3)
RTX_PRO = GpuSpec.by_name("NVIDIA RTX PRO 6000 Blackwell Server Edition")
H200 = GpuSpec.by_name("NVIDIA H200")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.mark.parametrize(("gpu", "kind"), [(RTX_PRO, "mma"), (H200, "wgmma")])
def test_compiles_for_a_gpu_that_is_not_here(cache: Path, gpu: GpuSpec, kind: str) -> None:
    config = LaunchConfig(64, 64, 64, 1, 4, 3)
    with CompilePool(get_kernel("builtin"), SHAPE, gpu.compute_capability, 1, cache, inspect=True) as pool:
        compiled = pool.submit(config, "up", 64).result(300)
    assert compiled.failure is None
    assert compiled.resources.shared_bytes == shared_bytes(config, SHAPE, "up", gpu)
    assert 16 <= compiled.resources.registers <= 255
    assert compiled.resources.compile_s > 0
    assert compiled.tensor_core.kind == kind
    assert compiled.tensor_core.operands == "bf16"


@pytest.mark.parametrize("damaged", ["__grp__*.json", "moe_kernel.json", "moe_kernel.cubin"])
def test_what_is_damaged_in_the_cache_is_compiled_again(tmp_path: Path, damaged: str) -> None:
    """A full disk or a power cut leaves empty files, which Triton reads for ever."""
    seconds = []
    for _ in range(3):
        with CompilePool(get_kernel("builtin"), SHAPE, (9, 0), 1, tmp_path) as pool:
            compiled = pool.submit(CONFIG, "up", 64).result(300)
        assert compiled.failure is None
        seconds.append(compiled.resources.compile_s)
        if len(seconds) == 1:
            (path,) = tmp_path.glob(f"*/{damaged}")
            path.write_bytes(b"")
    assert seconds[0] > 0 and seconds[1] > 0 and seconds[2] == 0
    assert not list((tmp_path / "moeopt" / "logs").iterdir())


def test_another_process_finds_the_binary_and_compiles_nothing(cache: Path) -> None:
    with CompilePool(get_kernel("builtin"), SHAPE, (12, 0), 1, cache) as pool:
        for role in ROLES:
            assert pool.submit(CONFIG, role, 64).result(300).failure is None
    # The stages of the compiler are taken away: whatever is not in the cache raises.
    script = textwrap.dedent(
        """
        from triton.backends.nvidia.compiler import CUDABackend
        from moeopt.kernels import get_kernel
        from moeopt.kernels.target import cross_target
        from moeopt.core.shape import MoEShape
        from moeopt.core.config import LaunchConfig

        def refuse(*args, **kwargs):
            raise AssertionError("this process compiles")

        CUDABackend.make_ttir = CUDABackend.make_ptx = CUDABackend.make_cubin = refuse
        kernel, shape = get_kernel("builtin"), MoEShape(8, 2, 512, 256)
        with cross_target((12, 0)):
            for m in (1, 3, 64, 4096):
                for role in ("up", "down"):
                    if kernel.specialisation(shape, role, m) == kernel.specialisation(shape, role, 64):
                        kernel.compile(shape, role, m, LaunchConfig(16, 64, 64, 1, 4, 3))
            try:
                kernel.compile(shape, "up", 64, LaunchConfig(32, 64, 64, 1, 4, 3))
            except AssertionError:
                print("found all, and would have noticed")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "found all, and would have noticed" in done.stdout, done.stderr[-2000:]


class TestCompileSweep:
    SPACE = SearchSpace(
        "few",
        {
            "BLOCK_SIZE_M": (16, 256),
            "BLOCK_SIZE_N": (32, 256),
            "BLOCK_SIZE_K": (64,),
            "GROUP_SIZE_M": (1,),
            "num_warps": (4,),
            "num_stages": (2, 5),
        },
    )

    def sweep(self, out: Path, space: SearchSpace | None = None, shape: MoEShape = SHAPE) -> CompileSweep:
        return CompileSweep(get_kernel("builtin"), shape, RTX_PRO, space or self.SPACE, [64], out)

    def test_a_recording_without_times_and_incremental(self, tmp_path: Path, cache: Path) -> None:
        out = tmp_path / "few.jsonl.gz"
        small = SearchSpace("few", {**self.SPACE.values, "BLOCK_SIZE_M": (16,)})
        with CompilePool(get_kernel("builtin"), SHAPE, (12, 0), 2, cache, inspect=True) as pool:
            first = self.sweep(out, small)
            first.run(pool)
            assert (first.counts.space, first.counts.illegal, first.counts.resumed) == (4, 1, 0)
            assert first.counts.compiled == 3
            asked = pool.counts.asked
            again = self.sweep(out, small)
            again.run(pool)
            assert (again.counts.compiled, again.counts.resumed) == (0, 3)
            assert pool.counts.asked == asked
        recording = Recording.load(out)
        assert recording.batch_sizes == ()
        assert len(recording.rows) == 4
        for config, row in recording.rows.items():
            if row.status == "ok":
                for role in ROLES:
                    assert row.roles[role].shared_bytes == shared_bytes(config, SHAPE, role, RTX_PRO)
        assert sum(first.counts.tensor_cores.values()) == 6
        assert set(first.counts.tensor_cores) == {"mma m16n8k16 bf16"}

    def test_what_a_deadline_ended_is_compiled_again(self, tmp_path: Path, cache: Path) -> None:
        """It may have waited for a busy machine; what the compiler refused stays refused."""
        out = tmp_path / "few.jsonl.gz"
        few = SearchSpace("few", {**self.SPACE.values, "BLOCK_SIZE_M": (16,), "BLOCK_SIZE_N": (32,)})
        rows = [
            {"config": config.to_dict(), "status": "compile_error", "compile_s": None, "reason": reason, "error": text}
            for config, reason, text in zip(
                few.configs(),
                ("timeout", "compile"),
                ("compiling took over 7 s", "PassManager::run failed"),
                strict=True,
            )
        ]
        sweep = self.sweep(out, few)
        lines = (json.dumps(line) + "\n" for line in (sweep._header().encode(), *rows))
        out.write_bytes(gzip.compress("".join(lines).encode()))
        with CompilePool(get_kernel("builtin"), SHAPE, (12, 0), 1, cache, inspect=True) as pool:
            sweep.run(pool)
        counts = sweep.counts
        assert (counts.compiled, counts.resumed, counts.failed, counts.timeouts) == (1, 1, 1, 0)
        assert counts.messages == {"PassManager::run failed": 1}

    def test_another_shape_in_the_file_is_refused(self, tmp_path: Path, cache: Path) -> None:
        out = tmp_path / "few.jsonl.gz"
        nothing = SearchSpace("big", {**self.SPACE.values, "BLOCK_SIZE_M": (256,), "num_stages": (5,)})
        with CompilePool(get_kernel("builtin"), SHAPE, (12, 0), 1, cache) as pool:
            self.sweep(out, nothing).run(pool)
            with pytest.raises(RecordingError, match="another shape"):
                self.sweep(out, nothing, SHAPE.replace(hidden_size=1024)).run(pool)
        out.write_bytes(b"not gzip")
        with pytest.raises(RecordingError, match="not a recording"):
            self.sweep(out).run(pool)
