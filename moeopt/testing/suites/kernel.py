"""Suite for a kernel."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.trial import MAX_RELATIVE_ERROR
from moeopt.kernels.base import MoEKernel

if TYPE_CHECKING:
    from torch import Tensor

Launches = Sequence[tuple[MoEShape, Role, LaunchConfig]]
BATCH_SIZES = (1, 2, 16, 100, 4096)


class KernelTestCase:
    """What moeopt expects of a :class:`~moeopt.kernels.base.MoEKernel`: override ``make_kernel``."""

    @pytest.fixture
    def make_kernel(self) -> Callable[[], MoEKernel]:
        """Makes the kernel."""
        raise NotImplementedError("override make_kernel: it makes the kernel that the suite is for")

    @pytest.fixture
    def kernel(self, make_kernel: Callable[[], MoEKernel]) -> MoEKernel:
        """The kernel."""
        return make_kernel()

    @pytest.fixture
    def shapes(self) -> Sequence[MoEShape]:
        """Small layers that it can run; one under expert parallelism has tokens for experts that are not here."""
        return (MoEShape(8, 2, 256, 128), MoEShape(8, 2, 256, 128, ep_size=2))

    @pytest.fixture
    def configs(self) -> Sequence[LaunchConfig]:
        """Some that it can run; those that a shape cannot be run with are left out there."""
        return (LaunchConfig(16, 64, 32, 1, 4, 3), LaunchConfig(64, 32, 64, 4, 4, 2))

    @pytest.fixture
    def gpu(self) -> GpuSpec:
        """The GPU that it compiles for: the one that is here, or an H200."""
        import torch

        return GpuSpec.detect() if torch.cuda.is_available() else GpuSpec.by_name("H200")

    @pytest.fixture
    def device(self) -> str:
        """The torch device that it runs on, skipped without a GPU; ``cpu`` for a kernel that Triton interprets."""
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU is here")
        return "cuda:0"

    @pytest.fixture
    def legal(
        self, kernel: MoEKernel, shapes: Sequence[MoEShape], configs: Sequence[LaunchConfig], gpu: GpuSpec
    ) -> Launches:
        """Each shape and role with each config that it can be run with."""
        given = [(shape, role) for shape in shapes for role in ROLES]
        found = [(s, r, c) for s, r in given for c in configs if kernel.illegal_reason(c, s, r, gpu) is None]
        assert {(s, r) for s, r, _ in found} == set(given), "each shape and role needs a config that is legal"
        return found

    def test_it_travels_and_its_key_is_stable(self, kernel: MoEKernel, make_kernel: Callable[[], MoEKernel]) -> None:
        assert make_kernel().key == kernel.key
        assert kernel.key.name and kernel.key.source_hash
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(key_of, pickle.dumps(kernel)).result() == kernel.key, "another process, another key"

    def test_the_default_config_is_legal(self, kernel: MoEKernel, shapes: Sequence[MoEShape], gpu: GpuSpec) -> None:
        for shape in shapes:
            kernel.check(shape, gpu)
            for role in ROLES:
                for m in BATCH_SIZES:
                    config = kernel.default_config(shape, role, m, gpu)
                    assert kernel.illegal_reason(config, shape, role, gpu) is None, (shape, role, m, config)

    def test_what_cannot_run_has_a_reason_of_one_line(
        self, kernel: MoEKernel, shapes: Sequence[MoEShape], gpu: GpuSpec
    ) -> None:
        for shape in shapes:
            for role in ROLES:
                reason = kernel.illegal_reason(LaunchConfig(256, 256, 256, 1, 4, 5), shape, role, gpu)
                assert reason and "\n" not in reason, (shape, role)

    def test_a_legal_config_compiles_once_for_each_specialisation(
        self,
        kernel: MoEKernel,
        legal: Launches,
        gpu: GpuSpec,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from moeopt.kernels.target import cross_target

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        with cross_target(gpu.compute_capability):
            for shape, role, config in legal:
                compiled = set()
                for m in BATCH_SIZES:
                    resources, name = kernel.compile(shape, role, m, config), kernel.specialisation(shape, role, m)
                    assert 0 < resources.shared_bytes <= gpu.shared_memory_per_block_optin, (shape, role, config)
                    assert resources.registers > 0
                    assert name not in compiled or resources.compile_s == 0, f"{name} has several binaries: {m}"
                    compiled.add(name)

    def test_its_results_are_right_and_come_again(self, kernel: MoEKernel, legal: Launches, device: str) -> None:
        import torch

        from moeopt.kernels.layer import make_batch, make_layer
        from moeopt.kernels.quant import compute_dtype
        from moeopt.kernels.reference import poison, reference, relative_error

        for shape, role, config in legal:
            kernel.load(shape)
            layer = make_layer(shape, device=device, seed=1)
            for tokens in (1, 7):
                batch = make_batch(layer, role, routed(shape, tokens), seed=2)
                expected = reference(layer, role, batch)
                # Rows past the operands: read, they spoil the result (all bytes 0x7F: NaN, 3e38 or 127); written,
                # they are NaN no longer.
                stored = batch.a.view(torch.uint8)
                a = torch.cat([stored, torch.full_like(stored, 0x7F)]).view(batch.a.dtype)[: len(stored)]
                batch = replace(batch, a=a)
                padded = torch.empty((2 * len(expected), expected.shape[1]), dtype=compute_dtype(shape), device=device)
                out, found = padded[: len(expected)], []
                launch = kernel.bind(layer, role, batch, config, out)
                for _ in range(2):
                    padded.fill_(float("nan"))
                    poison(out, batch, skips_remote_experts=kernel.skips_remote_experts(shape))
                    launch()
                    assert relative_error(out, expected) <= MAX_RELATIVE_ERROR, (shape, role, tokens, config)
                    assert bool(padded[len(expected) :].isnan().all()), "rows past the output were written"
                    found.append(out.clone())
                assert torch.equal(*found), ("a second launch gave other values", shape, role, tokens, config)


def key_of(pickled: bytes) -> KernelKey:
    """The key of a kernel that came from another process."""
    kernel: MoEKernel = pickle.loads(pickled)
    return kernel.key


def routed(shape: MoEShape, tokens: int) -> Tensor:
    """Experts [tokens, top_k]: the first token's are all the same, nobody visits expert 0, some are not here (-1)."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(min(1, shape.num_experts - 1), shape.num_experts, (tokens, shape.top_k), generator=generator)
    ids[0] = ids[0, 0]
    if shape.ep_size > 1:
        ids[1:2] = -1
        ids[2:, 0] = -1
    return ids
