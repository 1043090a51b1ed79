"""Compiling for GPUs that are not here."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.driver import driver

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import shared_bytes
from moeopt.core.shape import MoEShape, Role
from moeopt.kernels import builtin_kernel
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.kernels.builtin_launch import launch, options_for
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.target import _NoDevice, cross_target, current_capability
from tests.kernels.schemes import small_shape

GPUS = [GpuSpec.by_name("H200"), GpuSpec.by_name("RTX 5090")]
# K and rows that steps and tiles divide: small, and compiled like a real layer.
SIZES = {"num_experts": 16, "top_k": 2, "hidden_size": 1024, "intermediate_size": 256}
FEW, MANY = LaunchConfig(16, 64, 64, 1, 4, 4), LaunchConfig(64, 128, 64, 16, 4, 3)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    builtin_kernel.moe_kernel.device_caches.clear()
    return tmp_path / "triton"


def real_shape(scheme: str) -> MoEShape:
    block = {"block_shape": (128, 128)} if "block" in scheme else {}
    return small_shape(scheme, **SIZES, **block)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: f"sm_{g.sm}")
@pytest.mark.parametrize(
    "scheme", ["bf16", "fp8-channel", "fp8-block", "int8-channel", "int8-weights", "int4-group-32"]
)
def test_shared_memory_is_what_was_reckoned(scheme: str, gpu: GpuSpec) -> None:
    """Of binaries: exact without scales along K, and a little more for tiles of scales."""
    kernel, shape = BuiltinKernel(), real_shape(scheme)
    for config in (FEW, MANY):
        with cross_target(gpu.compute_capability):
            resources = kernel.compile(shape, "up", 64, config)
        extra = resources.shared_bytes - shared_bytes(config, shape, "up", gpu)
        assert 0 <= extra <= (1024 if shape.group_size else 0)
        assert 0 < resources.registers <= 255 and resources.spills == 0 and resources.compile_s > 0


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: f"sm_{g.sm}")
def test_compiled_once_then_found(gpu: GpuSpec, empty_cache: Path) -> None:
    kernel, shape = BuiltinKernel(), real_shape("bf16")
    with cross_target(gpu.compute_capability):
        assert current_capability() == gpu.compute_capability
        first = kernel.compile(shape, "up", 1, FEW)
        builtin_kernel.moe_kernel.device_caches.clear()
        again = kernel.compile(shape, "up", 4096, FEW)
    assert first.compile_s > 0 and again.compile_s == 0
    assert again.registers == first.registers
    assert len(list(empty_cache.glob("*/*.cubin"))) == 1


def test_roles_and_options_are_other_binaries(empty_cache: Path) -> None:
    kernel, shape = BuiltinKernel(), real_shape("bf16")
    with cross_target((12, 0)):
        kernel.compile(shape, "up", 64, FEW)
        kernel.compile(shape, "down", 64, FEW)
        limited = kernel.compile(shape, "up", 64, LaunchConfig(16, 64, 64, 1, 4, 4, maxnreg=48))
    assert limited.registers <= 48
    assert len(list(empty_cache.glob("*/*.cubin"))) == 3


@pytest.mark.parametrize(("scheme", "role"), [("bf16", "up"), ("fp8-block", "down"), ("int4-group-32", "up")])
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_a_launch_finds_what_was_compiled(
    scheme: str, role: Role, capability: tuple[int, int], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real tensors through the real launch path, with only the driver's last call taken away."""
    shape, config = real_shape(scheme), FEW
    with cross_target(capability):
        BuiltinKernel().compile(shape, role, 64, config)
    builtin_kernel.moe_kernel.device_caches.clear()
    before = {path.parent.name for path in empty_cache.glob("*/*.cubin")}
    launched: list[str] = []

    def launcher(source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: launched.append(metadata.hash)

    def load(*arguments: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 64, 0, 1024

    utils = SimpleNamespace(load_binary=load, get_device_properties=lambda device: {"max_shared_mem": 1 << 20})
    monkeypatch.setattr(_NoDevice, "launcher_cls", staticmethod(launcher), raising=False)
    monkeypatch.setattr(_NoDevice, "utils", utils, raising=False)
    # The tensors lie on the CPU: the kernel is not to be interpreted for it here.
    monkeypatch.setattr("moeopt.kernels.builtin_launch.CpuKernel", lambda fn: builtin_kernel.moe_kernel)
    layer = make_layer(shape, device="cpu", seed=0)
    for tokens in (1, 37):
        batch = make_batch(layer, role, torch.tensor([[0, 1]] * tokens), seed=0)
        out = torch.empty((batch.num_pairs, shape.output_rows(role)), dtype=torch.bfloat16)
        with cross_target(capability):
            launch(layer, role, batch, config, out, options_for(shape, role, config, capability))()
    assert len(launched) == 2 and launched[0] == launched[1]
    assert {path.parent.name for path in empty_cache.glob("*/*.cubin")} == before


def test_the_driver_is_put_back() -> None:
    before = driver._active
    with cross_target((9, 0)):
        with cross_target((12, 0)):
            assert current_capability() == (12, 0)
        assert current_capability() == (9, 0)
    assert driver._active is before
    with pytest.raises(KeyError), cross_target((9, 0)):
        raise KeyError
    assert driver._active is before


def test_what_the_compiler_raises_comes_through() -> None:
    with cross_target((9, 0)), pytest.raises(Exception, match=r"power of 2|power-of-two"):
        BuiltinKernel().compile(real_shape("bf16"), "up", 64, LaunchConfig(16, 48, 64, 1, 4, 3))


def test_kernel_functions_can_be_sent_to_processes() -> None:
    task = functools.partial(BuiltinKernel().compile, real_shape("bf16"), "up", 64, FEW)
    assert pickle.loads(pickle.dumps(task)).args == task.args


def test_compiling_after_interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter leaves Triton's language as it was."""
    assert os.environ.get("TRITON_INTERPRET", "0") != "1"
    shape = small_shape("bf16")
    layer = make_layer(shape, device="cpu", seed=0)
    batch = make_batch(layer, "up", torch.tensor([[0, 1]]), seed=0)
    out = torch.empty((2, shape.output_rows("up")), dtype=torch.bfloat16)
    BuiltinKernel().bind(layer, "up", batch, LaunchConfig(16, 32, 32, 1, 4, 2), out)()
    with cross_target((9, 0)):
        assert BuiltinKernel().compile(shape, "up", 1, FEW).compile_s > 0
