"""Sweep of a whole space through the compiler, for a GPU that need not be there: a recording without times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
from msgspec import UNSET

from moeopt.compile.occupancy import occupancy
from moeopt.compile.pool import Compiled, CompilePool
from moeopt.compile.rejection import rejection
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Resources
from moeopt.errors import MoeoptError, RecordingError
from moeopt.files import json_lines, write_file
from moeopt.kernels.base import MoEKernel
from moeopt.recordings.format import Header, RecordedConfig, RecordedRole, read_lines

# What is compiled at a time beyond what the pool runs: enough to keep it busy.
_AHEAD: Final = 4
_SAVE_S: Final = 30.0
# The reason of a compile that a deadline ended, apart from what the compiler refused.
TIMEOUT: Final = "timeout"


@dataclass
class SweepCounts:
    """What a sweep found.

    Attributes:
        space: Configs of the space.
        illegal: Over the GPU's limits by rule: never compiled.
        compiled: Both roles compiled now.
        resumed: Taken from the recording that was there.
        rejected: Of all compiled ones, those whose resources rule out a launch.
        failed: Failed to compile, now or in the recording that was there.
        timeouts: Of the failed ones, those that the deadline ended; the next sweep tries them again.
        messages: Failures by message.
        tensor_cores: Binaries by tensor-core instruction.
        occupancies: Binaries by (blocks per multiprocessor, what limits it).
        seconds: Wall time.
    """

    space: int = 0
    illegal: int = 0
    compiled: int = 0
    resumed: int = 0
    rejected: int = 0
    failed: int = 0
    timeouts: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    tensor_cores: Counter[str] = field(default_factory=Counter)
    occupancies: Counter[tuple[int, str]] = field(default_factory=Counter)
    seconds: float = 0.0


class CompileSweep:
    """Every config of a space, compiled for every binary that the batch sizes need.

    Args:
        kernel: What to compile.
        shape: The layer.
        gpu: By its limits; none need be present.
        space: What to compile.
        batch_sizes: Only the binaries they need count; the largest one's resources are written down.
        out: The recording, ending in ``.jsonl.gz``. What it holds already is not compiled again.
        one_group: Compile one GROUP_SIZE_M of each tile only: resources do not depend on it.
    """

    def __init__(
        self,
        kernel: MoEKernel,
        shape: MoEShape,
        gpu: GpuSpec,
        space: SearchSpace,
        batch_sizes: Sequence[int],
        out: Path,
        *,
        one_group: bool = False,
    ) -> None:
        kernel.check(shape, gpu)
        self.kernel = kernel
        self.shape = shape
        self.gpu = gpu
        self.space = space
        self.batch_sizes = tuple(sorted(batch_sizes, reverse=True))
        self.out = out
        configs = space.configs()
        if one_group:
            group = min(config.group_size_m for config in configs)
            configs = tuple(config for config in configs if config.group_size_m == group)
        self.configs = configs
        self.counts = SweepCounts(space=len(configs))

    def run(self, pool: CompilePool, on_config: Callable[[int, int], None] | None = None) -> Path:
        """Compiles what is missing and writes the recording.

        An interrupted sweep keeps what it has: the recording is written in any case, and every
        half minute, so that a killed one loses no more.

        Args:
            pool: Compiles for the GPU's compute capability.
            on_config: Called with (configs done, configs to do) after each.

        Raises:
            RecordingError: The output holds another shape, GPU, kernel or version.
            ExportError: The output cannot be written.
        """
        begin = time.monotonic()
        header = self._header()
        rows = self._read(header)
        legal = [config for config in self.configs if self._illegal(config) is None]
        for config in set(self.configs) - set(legal):
            rows[config] = RecordedConfig(config=config, status="out_of_resources", error=self._illegal(config))
        todo = [config for config in legal if config not in rows]
        self.counts.illegal = len(self.configs) - len(legal)
        self.counts.resumed = len(legal) - len(todo)
        try:
            saved = begin
            for number, row in enumerate(self._compile(pool, todo), start=1):
                rows[row.config] = row
                if time.monotonic() - saved > _SAVE_S:
                    self._write(header, rows)
                    saved = time.monotonic()
                if on_config is not None:
                    on_config(number, len(todo))
        finally:
            self._write(header, rows)
            self._count(rows)
            self.counts.seconds = time.monotonic() - begin
        return self.out

    def _illegal(self, config: LaunchConfig) -> str | None:
        reasons = (self.kernel.illegal_reason(config, self.shape, role, self.gpu) for role in ROLES)
        return next((reason for reason in reasons if reason), None)

    def _binaries(self) -> list[tuple[Role, int]]:
        """(role, batch size) of each distinct binary; a role's first is the one that is written down."""
        seen: dict[tuple[Role, str], int] = {}
        for role in ROLES:
            for m in self.batch_sizes:
                seen.setdefault((role, self.kernel.specialisation(self.shape, role, m)), m)
        return [(role, m) for (role, _), m in seen.items()]

    def _compile(self, pool: CompilePool, todo: Sequence[LaunchConfig]) -> Iterator[RecordedConfig]:
        binaries = self._binaries()
        waiting: dict[LaunchConfig, dict[Future[Compiled], Role]] = {}
        open_futures: dict[Future[Compiled], LaunchConfig] = {}
        coming = iter(todo)
        more = True
        while True:
            while more and len(open_futures) < _AHEAD * pool.workers:
                config = next(coming, None)
                if config is None:
                    more = False
                    break
                waiting[config] = {pool.submit(config, role, m): role for role, m in binaries}
                open_futures |= dict.fromkeys(waiting[config], config)
            if not open_futures:
                return
            done, _ = wait(open_futures, return_when=FIRST_COMPLETED)
            for future in done:
                config = open_futures.pop(future)
                if config in waiting and all(f.done() for f in waiting[config]):
                    futures = waiting.pop(config)
                    yield self._row(config, [(role, f.result()) for f, role in futures.items()])

    def _row(self, config: LaunchConfig, results: Sequence[tuple[Role, Compiled]]) -> RecordedConfig:
        failure = next((compiled.failure for _, compiled in results if compiled.failure), None)
        if failure is not None:
            return RecordedConfig(config=config, status="compile_error", reason=failure.reason, error=failure.message)
        seconds = sum(compiled.resources.compile_s for _, compiled in results if compiled.resources is not None)
        up, down = (
            next((self._role(config, one, one.resources) for of, one in results if of == role and one.resources), UNSET)
            for role in ROLES
        )
        return RecordedConfig(config=config, status="ok", compile_s=round(seconds, 3), up=up, down=down)

    def _role(self, config: LaunchConfig, compiled: Compiled, resources: Resources) -> RecordedRole:
        core, refused = compiled.tensor_core, rejection(resources, self.gpu)
        return RecordedRole(
            registers=resources.registers,
            spills=resources.spills,
            shared_bytes=resources.shared_bytes,
            us={},
            occupancy=occupancy(resources, config, self.gpu),
            tensor_core={"kind": core.kind, "tile": core.tile, "operands": core.operands} if core else None,
            rejected=refused.message if refused is not None else UNSET,
        )

    def _count(self, rows: Mapping[LaunchConfig, RecordedConfig]) -> None:
        counts = self.counts
        for row in (rows[config] for config in self.configs if config in rows):
            if row.status == "compile_error":
                counts.failed += 1
                counts.timeouts += row.reason == TIMEOUT
                counts.messages[str(row.error)] += 1
            elif row.status == "ok":
                counts.compiled += 1
                counts.rejected += any(part.rejected for part in row.roles.values())
                for part in row.roles.values():
                    if part.tensor_core:
                        counts.tensor_cores[" ".join(filter(None, part.tensor_core.values()))] += 1
                    if part.occupancy:
                        counts.occupancies[(part.occupancy.blocks, part.occupancy.limited_by)] += 1
        counts.compiled = max(0, counts.compiled + counts.failed - counts.resumed)

    def _header(self) -> Header:
        key = self.kernel.key
        return Header(
            kernel=f"{key.name} {key.version}".strip(),
            kernel_hash=key.source_hash,
            shape=self.shape,
            gpu=self.gpu,
            versions={"triton": version("triton"), "moeopt": version("moeopt")},
            timing="none: compiled without a GPU",
            space={name: list(values) for name, values in self.space.values.items()},
            batch_sizes=list(self.batch_sizes),
            complete=False,
        )

    def _read(self, header: Header) -> dict[LaunchConfig, RecordedConfig]:
        if not self.out.exists():
            return {}
        try:
            first, *lines = read_lines(self.out)
            old, rows = Header.decode(first), [RecordedConfig.decode(line) for line in lines]
        except (MoeoptError, msgspec.ValidationError) as error:
            raise RecordingError(f"{self.out}: not a recording ({error}); give another --out, or delete it") from None
        for name in ("kernel", "kernel_hash", "shape", "gpu", "timing"):
            if getattr(old, name) != getattr(header, name):
                raise RecordingError(f"{self.out} is of another {name}: give another --out, or delete it")
        if old.versions.get("triton") != header.versions["triton"]:
            raise RecordingError(
                f"{self.out} was compiled with Triton {old.versions.get('triton')} and this is "
                f"{header.versions['triton']}: give another --out, or delete it"
            )
        # What a deadline ended may have waited for a busy machine: it is compiled again.
        return {row.config: row for row in rows if row.status != "out_of_resources" and row.reason != TIMEOUT}

    def _write(self, header: Header, rows: Mapping[LaunchConfig, RecordedConfig]) -> None:
        complete = all(config in rows for config in self.space.configs())
        header = msgspec.structs.replace(header, complete=complete)
        write_file(self.out, json_lines([header.encode(), *(rows[config].encode() for config in sorted(rows))]))
