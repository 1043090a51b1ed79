"""EngineSpec: everything in which an engine differs from another, in one frozen value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from moeopt.core.config import PARAMETERS, LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.engines.file_names import FileNames
from moeopt.engines.layout import Layout
from moeopt.engines.log import ServerLog
from moeopt.engines.serving import ServingRules

# Triton's own where an engine sets none.
TRITON_WARPS: Final = 4
TRITON_STAGES: Final = 3


_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]*=")


def _no_keys(shape: MoEShape) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True)
class KernelFile:
    """Where an engine's fused MoE kernel is, and what launches it.

    Attributes:
        variable: Environment variable that names a kernel file or an unpacked tree.
        versions: The range of engine versions that the adapter is tested with.
        paths: Where the kernel file has been, relative to the package, newest first.
        adapter: ``module:class`` of its :class:`~moeopt.kernels.base.MoEKernel`.
        column_scales: Whether block-wise scales are loaded one for each column.
    """

    variable: str
    versions: str
    paths: tuple[str, ...]
    adapter: str
    column_scales: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """How a server is started.

    Attributes:
        command: The start, with ``{model}``.
        tp_option: Option of the tensor-parallel size.
        kept: Settings of a running server that its next start has to repeat, where they are not off or 1.
    """

    command: str
    tp_option: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine. Register it with :func:`moeopt.engines.register`, and everything knows it by its name.

    Attributes:
        name: How options and databases call it; also its package's name.
        title: As its makers write it.
        kernel: Its kernel's file and adapter.
        names: Its rule for file names.
        layout: Its rule for directories.
        variable: Environment variable that names the directory of config files.
        replaces_bundled: Whether that directory stands in for the one that the engine ships; else it comes first.
        bundled: Where releases keep their files, relative to the package, newest first.
        default_config: The config of both roles where no file is found: shape, batch size, GPU.
        shards: How many parts N is cut into, from tensor- and expert-parallel size; raises InvalidInputError
            where the engine does not take these two.
        server: How it is started.
        serving: Which kernel it runs for which checkpoint.
        log: How its log is read.
        more_keys: Keys that an entry may have beyond the launch parameters that the engine takes.
        fixed_keys: Keys that an entry may have and the engine sets itself.
        added_keys: Keys that an entry needs beyond a launch config's own, by shape.
        clamps_block_k: Whether a BLOCK_SIZE_K over block_k is launched as block_k; else its numbers are wrong.
        notes_triton_version: Whether a file may say ``triton_version`` beside its batch sizes.
        fuses_shared_experts: Whether shared experts are appended to the routed ones, where the family allows it.
    """

    name: str
    title: str
    kernel: KernelFile
    names: FileNames
    layout: Layout
    variable: str
    replaces_bundled: bool
    bundled: tuple[str, ...]
    default_config: Callable[[MoEShape, int, GpuSpec], LaunchConfig]
    shards: Callable[[int, int], int]
    server: Server
    log: ServerLog
    serving: ServingRules = field(default_factory=ServingRules)
    more_keys: frozenset[str] = frozenset({"num_ctas"})
    fixed_keys: Mapping[str, int] = field(default_factory=dict)
    added_keys: Callable[[MoEShape], Mapping[str, int]] = _no_keys
    clamps_block_k: bool = False
    notes_triton_version: bool = False
    fuses_shared_experts: bool = False

    @property
    def split(self) -> bool:
        """Whether each projection has a file of its own; else one config serves both."""
        return self.names.split

    @property
    def keys(self) -> frozenset[str]:
        """Keys that an entry may have."""
        return self.more_keys | {key for key, row in PARAMETERS.items() if row.taken_by(self.name)}

    def start(self, model: str | None, *options: str | None, directory: str | None = None) -> str:
        """The line that starts a server.

        Args:
            model: Its name or path, or None for a placeholder.
            *options: More options, environment variables (``NAME=value``) among them; None is none.
            directory: What the engine's variable names, as the shell reads it.
        """
        given = [option for option in options if option]
        variables = [option for option in given if _VARIABLE.match(option)]
        if directory is not None:
            variables.insert(0, f"{self.variable}={directory}")
        command = self.server.command.format(model=shlex.quote(model) if model else "MODEL")
        return " ".join([*variables, command, *(option for option in given if option not in variables)])


def sizes_that_divide(total: int) -> str:
    """The sizes that divide a number, for messages."""
    return ", ".join(str(d) for d in range(1, min(total, 256) + 1) if total % d == 0)
