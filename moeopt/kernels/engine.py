"""Adapters of the engines' kernels: what they have in common."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeopt import engines
from moeopt.core.config import LaunchConfig
from moeopt.core.dtypes import DTYPES
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import gptq_shared_bytes, illegal_reason, shared_bytes, tile_reason, unsupported_reason
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.trial import Resources
from moeopt.engines.source import EngineSource, find_engine
from moeopt.errors import InvalidInputError, UnsupportedShapeError
from moeopt.kernels.base import MoEKernel

if TYPE_CHECKING:
    from torch import Tensor

    from moeopt.engines.module import KernelNames
    from moeopt.kernels.engine_launch import Launch
    from moeopt.kernels.layer import Layer, RoutedBatch

KERNELS: Final = ("fused_moe_kernel", "fused_moe_kernel_gptq_awq")
_BLOCK_SIZES_M: Final = (16, 32, 64, 128, 256)


class EngineKernel(MoEKernel):
    """An engine's fused MoE kernel, launched as the engine launches it.

    Args:
        path: The kernel file or an unpacked tree; None to look for the engine
            (:func:`moeopt.engines.source.find_engine`).

    Raises:
        DeviceError: The engine is not here.
        InvalidInputError: The path holds no such kernel.
    """

    name: str

    def __init__(self, path: str | Path | None = None) -> None:
        self.source: EngineSource = find_engine(self.name, path)

    @property
    def key(self) -> KernelKey:
        return KernelKey(self.name, self.source.version, self.source.source_hash)

    @property
    def title(self) -> str:
        """The engine and its file, for messages."""
        version = f" {self.source.version}" if self.source.version else ""
        return f"{engines.get(self.name).title}{version} ({self.source.path})"

    def check(self, shape: MoEShape, gpu: GpuSpec) -> None:
        if reason := unsupported_reason(shape, gpu):
            raise UnsupportedShapeError(reason)
        # A whole launch is recorded, so that what the engine itself refuses is refused here.
        for role in ROLES:
            self.meta_launch(shape, role, 1, self.default_config(shape, role, 1, gpu), gpu.compute_capability)

    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        shared = engine_shared_bytes(self.name, config, shape, role, gpu)
        block_k = config.block_size_k
        if reason := illegal_reason(config, shape, role, gpu, shared=shared) or tile_reason(config, shape):
            return reason
        if shape.group_size and shape.reduction(role) % block_k:
            return (
                f"BLOCK_SIZE_K {block_k} does not divide K {shape.reduction(role)}: the kernel reads past the weights"
            )
        return None

    def default_config(self, shape: MoEShape, role: Role, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
        return engines.get(self.name).default_config(shape, batch_size, gpu)

    def arg_names(self) -> tuple[str, ...]:
        """Arguments of the engine's kernel: what this version of the engine can do."""
        return _load(type(self), self.source).arg_names

    def specialisation(self, shape: MoEShape, role: Role, batch_size: int) -> str:
        return _specialisation(self, shape, role, batch_size)

    def compile(self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig) -> Resources:
        from moeopt.kernels.target import compile_resources, current_capability

        launch = self.meta_launch(shape, role, batch_size, config, current_capability())
        return compile_resources(launch.warmup)

    def load(self, shape: MoEShape) -> str:
        """Imports the engine where its package is installed and can be imported; else its kernel file serves alone.

        The file serves alone, too, where the imported engine's launch asks for what only a running server has.
        Only the process that launches imports: the compile processes need the same binaries and signatures, which
        the file alone gives in a fraction of the time.
        """
        module, why = self.source.module, "it was named by its path"
        if module:
            key, step = (type(self), self.source), "imported"
            try:
                if key not in _IMPORTED:
                    _IMPORTED[key] = _Loaded(*key, imported=True)
                step = "launched without its server"
                config = LaunchConfig(16, 64, min(64, *(shape.block_shape or (64,))), 1, 4, 3)
                for role in ROLES:
                    for batch_size in (1, 64):
                        self.meta_launch(shape, role, batch_size, config, (9, 0))
            # Another package's import may raise anything, and ends the process where it finds no GPU that it knows.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                _IMPORTED.pop(key, None)
                cause = error.__cause__ or error
                why = f"{module} cannot be {step}: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
            else:
                return f"{self.title}, imported as {module}"
        return f"{self.title}, its kernel file loaded alone ({why})"

    def bind(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> Callable[[], None]:
        import torch

        if layer.shape.ep_size == 1 and bool((batch.topk_ids < 0).any()):
            raise InvalidInputError("topk_ids holds -1 and the shape's ep_size is 1: all experts are on this GPU then")
        capability = torch.cuda.get_device_capability(out.device) if out.is_cuda else (0, 0)
        return self.launch(layer, role, batch, config, out, capability)

    def launch(
        self,
        layer: Layer,
        role: Role,
        batch: RoutedBatch,
        config: LaunchConfig,
        out: Tensor,
        capability: tuple[int, int],
    ) -> Launch:
        """The engine's launch for these operands on a GPU of this compute capability, not launched yet.

        Args:
            layer: Weights and scales, on a GPU or on the ``meta`` device.
            role: Which projection.
            batch: Routed tokens.
            config: How to launch.
            out: [M * top_k, output rows].
            capability: (major, minor).

        Raises:
            UnsupportedShapeError: The engine refuses the shape, or launches in a way that is not known.
        """
        loaded = _IMPORTED.get((type(self), self.source)) or _load(type(self), self.source)
        with loaded.lock:
            return loaded.record(self, layer, role, batch, config, out, capability)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineKernel) and other.source == self.source

    def __hash__(self) -> int:
        return hash(self.source)

    def can_use_tma(self, shape: MoEShape, role: Role) -> bool:
        """Whether USE_TMA means something to this kernel for this role."""
        return False

    def meta_launch(
        self, shape: MoEShape, role: Role, batch_size: int, config: LaunchConfig, capability: tuple[int, int]
    ) -> Launch:
        """:meth:`launch` with operands that have shapes, strides and dtypes, and no memory."""
        from moeopt.kernels.engine_launch import meta_operands

        layer, batch, out = meta_operands(shape, role, batch_size)
        return self.launch(layer, role, batch, config, out, capability)

    @classmethod
    @abstractmethod
    def stand_ins(cls, context: LaunchContext) -> Mapping[str, Any]:
        """By name, what the kernel file finds where it imports that name from its engine."""

    @classmethod
    @abstractmethod
    def overrides(cls) -> Mapping[str, Any]:
        """Names of the kernel file itself that are replaced once it is loaded."""

    @abstractmethod
    def launching_function(self, module: KernelNames, shape: MoEShape) -> str:
        """Name of the engine's function that launches the kernel for this shape."""

    @abstractmethod
    def launch_values(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> dict[str, Any]:
        """By parameter name, what the engine's launching function is given (see :meth:`launch`)."""

    def common_values(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> dict[str, Any]:
        """The part of :meth:`launch_values` that the engines share."""
        import torch
        import triton.language as tl

        shape, weights = layer.shape, layer.weights(role)
        options = config.to_dict()
        options.pop("USE_TMA", None)
        grouped = (0, shape.group_size) if shape.group_size else None
        block = shape.block_shape or grouped
        return {
            "A": batch.a,
            "B": weights.q,
            "C": out.view(batch.num_tokens, shape.top_k, -1),
            "A_scale": batch.a_scale,
            "B_scale": weights.scale,
            "B_zp": None,
            "topk_weights": batch.topk_weights,
            "topk_ids": batch.topk_ids,
            "mul_routed_weight": role == "down",
            "top_k": shape.top_k if role == "up" else 1,
            "config": options,
            "compute_type": tl.float16 if out.dtype == torch.float16 else tl.bfloat16,
            **{f"use_{dtype}": shape.dtype == dtype for dtype, spec in DTYPES.items() if spec.weight_bits < 16},
            "per_channel_quant": shape.per_channel,
            "block_shape": list(block) if block else None,
        }


def engine_shared_bytes(
    engine: str,
    config: LaunchConfig,
    shape: MoEShape,
    role: Role,
    gpu: GpuSpec,
    triton: tuple[int, ...] | None = None,
) -> int:
    """Bytes of shared memory of one program of an engine's kernel.

    Exact for what ``tests/core/test_limits_exact.py`` holds.

    Args:
        engine: Its name.
        config: What may be tried.
        shape: The layer.
        role: Which projection.
        gpu: Where it runs.
        triton: Which version compiles; None for the installed one.
    """
    if shape.group_size:
        return gptq_shared_bytes(config, shape, role, gpu, triton or installed_triton())
    return shared_bytes(config, shape, role, gpu, column_scales=engines.get(engine).kernel.column_scales)


@functools.cache
def installed_triton() -> tuple[int, ...]:
    """Version of Triton here, under any of its names; 3.6, which most engines bring, where there is none."""
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            return tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
    return (3, 6)


class LaunchContext:
    """What stand-ins answer from while a launch is recorded."""

    def __init__(self) -> None:
        self.capability: tuple[int, int] = (0, 0)
        self.a_scale: Tensor | None = None

    def quantised(self, a: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Stands for every function that quantises activations: the batch's are already."""
        return a, self.a_scale


class _Loaded:
    """A kernel file of an engine, loaded in this process: imported with its package, or alone."""

    def __init__(self, kind: type[EngineKernel], source: EngineSource, *, imported: bool = False) -> None:
        import triton
        import triton.language as tl

        from moeopt.engines.imports import ImportedModule
        from moeopt.engines.module import EngineModule
        from moeopt.kernels.engine_launch import Recorder, check_arguments

        path = source.path
        self.lock = threading.Lock()
        self.context = LaunchContext()
        given = {"tl": tl, "triton": triton, **kind.stand_ins(self.context)}
        self.module: KernelNames = ImportedModule(source, given) if imported else EngineModule(path, kind.name, given)
        self.launches: list[Launch] = []
        self.kernels: dict[str, Any] = {}
        for name in KERNELS:
            kernel = self.module.get(name)
            check_arguments(kernel, f"{engines.get(kind.name).title} ({path})")
            self.kernels[name] = kernel
            self.module.names[name] = Recorder(kernel, self.launches)
        self.module.names.update({n: v for n, v in kind.overrides().items() if n in self.module.names})
        self.arg_names = tuple(self.kernels[KERNELS[0]].arg_names)

    def record(
        self,
        kernel: EngineKernel,
        layer: Layer,
        role: Role,
        batch: RoutedBatch,
        config: LaunchConfig,
        out: Tensor,
        capability: tuple[int, int],
    ) -> Launch:
        from moeopt.kernels.engine_launch import call_by_name

        name = kernel.launching_function(self.module, layer.shape)
        function = self.module.get(name)
        if function is None:
            raise UnsupportedShapeError(
                f"{kernel.title} has no function {name}, which launches the kernel in the versions that moeopt is "
                f"tested with ({engines.get(kernel.name).kernel.versions}): use one of them, or kernel 'builtin'"
            )
        self.context.capability = capability
        values = kernel.launch_values(layer, role, batch, config, out)
        self.context.a_scale = values["A_scale"]
        self.launches.clear()
        try:
            call_by_name(function, values, kernel.title)
        except UnsupportedShapeError:
            raise
        except (AssertionError, AttributeError, TypeError, ValueError, LookupError) as error:
            raise UnsupportedShapeError(
                f"{kernel.title} refuses {layer.shape.slug()} ({type(error).__name__}: {error or 'in its launch'}): "
                "check dtype, block_shape and per_channel, or use kernel 'builtin'"
            ) from error
        finally:
            self.context.a_scale = None
        if len(self.launches) != 1:
            raise UnsupportedShapeError(
                f"{name} of {kernel.title} made {len(self.launches)} launches of the fused MoE kernel, expected 1: "
                "use an engine version that moeopt is tested with, or kernel 'builtin'"
            )
        return self.launches.pop()


# What :meth:`EngineKernel.load` imported in this process.
_IMPORTED: Final[dict[tuple[type[EngineKernel], EngineSource], _Loaded]] = {}


@functools.cache
def _load(kind: type[EngineKernel], source: EngineSource) -> _Loaded:
    return _Loaded(kind, source)


@functools.lru_cache(maxsize=4096)
def _specialisation(kernel: EngineKernel, shape: MoEShape, role: Role, batch_size: int) -> str:
    """A hash over the launches of every BLOCK_SIZE_M, on which an engine's argument sizes depend."""
    block_k = min(64, *(shape.block_shape or (64,)))
    launches = []
    for block_m in _BLOCK_SIZES_M:
        for tma in (False, True) if kernel.can_use_tma(shape, role) else (False,):
            config = LaunchConfig(block_m, 64, block_k, 1, 4, 3, use_tma=tma)
            # Dependent launches exist from compute capability 9 on, and their form depends on M.
            launches.append(kernel.meta_launch(shape, role, batch_size, config, (9, 0)).specialisation())
    return hashlib.sha256(" ".join(launches).encode()).hexdigest()[:16]
