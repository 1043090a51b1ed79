"""The shared memory of every tile of the published grid, as the compiler allocates it: no GPU is touched.

    python benchmarks/compile_grid.py tests/data/resources --kernel builtin --capability 12.0 --capability 9.0

Writes one file per (kernel, Triton version, compute capability, scheme) that tests/core/test_limits_exact.py
holds the rule of moeopt/resources.py against; what a file holds already is not compiled again. Compiling
ends where shared memory is allocated, which is 5 to 10 times faster than going on to a binary and gives
the very number: configs over every GPU's limit, which take the compiler longest, are counted, too.
GROUP_SIZE_M is 1; that it does not matter is seen on a sample of each file, compiled with its other values,
too. For SGLang's and vLLM's kernels set MOEOPT_SGLANG_KERNEL and MOEOPT_VLLM_KERNEL to an unpacked wheel,
or install the engine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moeopt.compile import CompilePool
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Resources
from moeopt.kernels import get_kernel
from moeopt.kernels.base import MoEKernel

SHAPES = {
    "bf16": MoEShape(256, 8, 3072, 256),
    "fp8": MoEShape(256, 8, 6144, 256, "fp8_w8a8"),
    "fp8-channel": MoEShape(256, 8, 6144, 256, "fp8_w8a8", per_channel=True),
    "fp8-block": MoEShape(256, 8, 6144, 256, "fp8_w8a8", (128, 128)),
    "int8-channel": MoEShape(256, 8, 6144, 256, "int8_w8a8", per_channel=True),
    "int8-group": MoEShape(256, 8, 6144, 256, "int8_w8a16", group_size=128),
    "int4-group": MoEShape(256, 8, 6144, 256, "int4_w4a16", group_size=128),
}


# Tiles of each file that are compiled with every GROUP_SIZE_M.
GROUP_SAMPLE = 8


class PatientPool(CompilePool):
    """A pool that waits for the slowest: a number is wanted of every tile, on a busy machine, too."""

    @property
    def deadline_s(self) -> float:
        return 600.0


class Allocated(Exception):  # noqa: N818  (no error: it ends a compile that has gone far enough)
    """Carries the shared memory out of the compiler."""

    def __init__(self, shared: int) -> None:
        super().__init__(shared)
        self.shared = shared


def allocate_only(self: Any, src: Any, metadata: Any, options: Any, capability: int) -> None:
    """In place of Triton's lowering to LLVM: its first passes, up to the allocation of shared memory."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.nvidia import compiler

    manager = ir.pass_manager(src.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    try:
        passes.ttgpuir.add_allocate_warp_groups(manager)
    except TypeError:  # Triton 3.9
        passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    ptx_version = compiler.get_ptx_version_from_options(options, self.target.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, ptx_version)
    manager.run(src, "allocate_only")
    raise Allocated(int(src.get_int_attr("ttg.shared")))


class SharedOnly(MoEKernel):
    """A kernel whose compile ends where shared memory is allocated."""

    def __init__(self, kernel: MoEKernel) -> None:
        self.kernel = kernel

    @property
    def key(self) -> KernelKey:
        key = self.kernel.key
        return KernelKey(f"{key.name}-shared-only", key.version, key.source_hash)

    def check(self, shape: MoEShape, gpu: GpuSpec) -> None:
        self.kernel.check(shape, gpu)

    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        return self.kernel.illegal_reason(config, shape, role, gpu)

    def default_config(self, shape: MoEShape, role: Role, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
        return self.kernel.default_config(shape, role, batch_size, gpu)

    def specialisation(self, shape: MoEShape, role: Role, batch_size: int) -> str:
        return self.kernel.specialisation(shape, role, batch_size)

    def compile(self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
        from triton.backends.nvidia.compiler import CUDABackend

        CUDABackend.make_llir = allocate_only
        begin = time.perf_counter()
        try:
            self.kernel.compile(shape, role, batch_size, config)
        except Allocated as done:
            return Resources(0, 0, done.shared, time.perf_counter() - begin)
        raise RuntimeError("the compiler did not allocate shared memory: the binary came from a cache")

    def bind(self, *args: Any) -> Callable[[], None]:
        raise NotImplementedError("a kernel whose compile ends before a binary has nothing to launch")


@dataclass
class Grid:
    """One file.

    Attributes:
        shared: By tile and role, the bytes with GROUP_SIZE_M 1, or the compiler's message.
        groups: The same for other GROUP_SIZE_M, of a sample, by tile, role and GROUP_SIZE_M.
    """

    shared: dict[str, int | str] = field(default_factory=dict)
    groups: dict[str, int | str] = field(default_factory=dict)


def sweep(
    kernel: MoEKernel, shape: MoEShape, capability: tuple[int, int], out: Path, options: argparse.Namespace
) -> None:
    """Compiles what is missing of one file."""
    space = SearchSpace.grid(shape)
    tiles = sorted({_tile(c) for c in space.configs()})
    tasks = [(tile, role) for tile in tiles for role in ROLES]
    random.Random(0).shuffle(tasks)
    grid = Grid()
    if out.exists():
        old = json.loads(gzip.decompress(out.read_bytes()))
        if old["kernel_hash"] == kernel.key.source_hash:
            grid = Grid(old["shared"], old.get("groups", {}))
    todo: list[tuple[dict[str, int | str], str, LaunchConfig, Role]] = []
    for tile, role in tasks[: options.limit]:
        if _name(tile, role) not in grid.shared:
            todo.append((grid.shared, _name(tile, role), LaunchConfig(*tile[:3], 1, *tile[3:]), role))
    for tile, role in tasks[:GROUP_SAMPLE]:
        for group in space.values["GROUP_SIZE_M"]:
            name = f"{_name(tile, role)} {group}"
            if group != 1 and name not in grid.groups:
                todo.append((grid.groups, name, LaunchConfig(*tile[:3], int(group), *tile[3:]), role))
    begin = time.monotonic()
    with PatientPool(SharedOnly(kernel), shape, capability, options.workers, options.cache_dir) as pool:
        futures = [pool.submit(config, role, 64) for _, _, config, role in todo]
        for done, ((values, name, _, _), future) in enumerate(zip(todo, futures, strict=True), start=1):
            compiled = future.result()
            if compiled.resources is not None:
                values[name] = compiled.resources.shared_bytes
            elif compiled.failure is not None:
                values[name] = compiled.failure.message
            if done % 25 == 0 or done == len(futures):
                _write(out, kernel, shape, capability, len(tasks), grid)
    failed = sum(isinstance(value, str) for value in grid.shared.values())
    seconds = time.monotonic() - begin
    print(
        f"{out.name}: {len(grid.shared)} of {len(tasks)}, {failed} failed, {len(todo)} now in {seconds:.0f} s",
        flush=True,
    )


def _write(out: Path, kernel: MoEKernel, shape: MoEShape, capability: tuple[int, int], of: int, grid: Grid) -> None:
    content = {
        "kernel": kernel.key.name,
        "kernel_version": kernel.key.version,
        "kernel_hash": kernel.key.source_hash,
        "triton": version("triton"),
        "shape": shape.to_dict(),
        "capability": list(capability),
        "of": of,
        "shared": dict(sorted(grid.shared.items())),
        "groups": dict(sorted(grid.groups.items())),
    }
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0))
    temporary.replace(out)


def _tile(c: LaunchConfig) -> tuple[int, int, int, int, int]:
    return c.block_size_m, c.block_size_n, c.block_size_k, c.num_warps, c.num_stages


def _name(tile: tuple[int, ...], role: Role) -> str:
    return " ".join(map(str, tile)) + f" {role}"


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernel", action="append", choices=("builtin", "sglang", "vllm"))
    parser.add_argument("--capability", action="append", help="such as 12.0 (default: 12.0 and 9.0)")
    parser.add_argument("--scheme", action="append", choices=tuple(SHAPES))
    parser.add_argument("--limit", type=int, help="only so many (tile, role) of each, evenly drawn")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/compile-grid"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.kernel or ("builtin",):
        kernel = get_kernel(name)
        for capability in options.capability or ("12.0", "9.0"):
            major, minor = (int(part) for part in capability.split("."))
            for scheme in options.scheme or SHAPES:
                file = f"{name}-triton{version('triton')}-sm{major}{minor}-{scheme}.json.gz"
                sweep(kernel, SHAPES[scheme], (major, minor), options.out / file, options)


if __name__ == "__main__":
    # The workers import the kernel class by this name.
    from benchmarks import compile_grid

    compile_grid.main()
