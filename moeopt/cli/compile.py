"""``moeopt compile``."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from moeopt.cli import options as o
from moeopt.cli.signals import end_on_sigterm
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import choose_batch_sizes
from moeopt.core.space import SearchSpace
from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    from moeopt.recordings.compile_sweep import SweepCounts


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("compile")(o.with_groups(compile_space))


def compile_space(
    study: Annotated[Path | None, typer.Argument(help="A study file (TOML).", show_default=False)] = None,
    given: o.ShapeOptions = o.NO_SHAPE,
    gpu: Annotated[str | None, typer.Option("--gpu", help=f"The GPU to compile for: {o.GPU_SPEC}.")] = None,
    batch_sizes: o.BatchSizesOption = None,
    space: Annotated[str, typer.Option("--space", help="grid or wide.")] = "grid",
    kernel: Annotated[str, typer.Option("--kernel", help=o.KERNELS)] = "builtin",
    workers: Annotated[int | None, typer.Option("--workers", help="Compile processes. Default: cores - 1.")] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option("--cache-dir", help="Fill this Triton cache; ship it and set TRITON_CACHE_DIR to it there."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The recording to write or go on with, ending in .jsonl.gz.")
    ] = None,
    one_group: Annotated[
        bool, typer.Option("--one-group", help="One GROUP_SIZE_M of each tile only: resources do not depend on it.")
    ] = False,
) -> None:
    """Compile a whole space for a GPU that need not be here: resources, occupancy, failures, and Triton's cache."""
    from moeopt.compile import CompilePool
    from moeopt.kernels import get_kernel
    from moeopt.recordings.compile_sweep import CompileSweep

    file = o.read_study(study, given)
    shape = file.shape if file is not None else given.resolve()[0]
    name = gpu or (file.tune.gpu if file is not None else None)
    if name is None:
        raise InvalidInputError('--gpu is missing: name the GPU to compile for, such as --gpu "NVIDIA H200"')
    target = GpuSpec.named(name)
    chosen = get_kernel(kernel, engine=given.named_engine)
    searched = SearchSpace.named(space, shape)
    path = out or Path(f"{target.name.replace(' ', '-')}-{shape.slug()}-{chosen.key.name}-{space}-compiled.jsonl.gz")
    if not path.name.endswith(".jsonl.gz"):
        raise InvalidInputError(f"--out is {str(path)!r}: it must end in .jsonl.gz")
    sizes = choose_batch_sizes(o.parse_batch_sizes(batch_sizes))
    sweep = CompileSweep(chosen, shape, target, searched, sizes, path, one_group=one_group)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    end_on_sigterm()
    console.print(f"compiling for {target.name} (sm_{target.sm}) with Triton {version('triton')}; no GPU is touched")
    with (
        CompilePool(chosen, shape, target.compute_capability, workers, cache_dir, inspect=True) as pool,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("compiling", total=None)
        cache, interrupted = pool.cache_dir, False
        try:
            sweep.run(pool, lambda done, total: progress.update(task, completed=done, total=total))
        except KeyboardInterrupt:
            interrupted = True
    for line in _report(sweep.counts, pool.workers):
        console.print(line)
    console.print(f"wrote {path}; binaries are in {cache}")
    if interrupted:
        console.print("interrupted: the same command goes on from there")
        raise typer.Exit(130)


def _report(counts: SweepCounts, workers: int) -> list[str]:
    late = f" ({counts.timeouts} ended by the deadline: run again to try them again)" if counts.timeouts else ""
    lines = [
        f"{counts.space} configs: {counts.illegal} over the GPU's limits, {counts.space - counts.illegal} legal, of "
        f"which {counts.compiled} compiled now and {counts.resumed} before, {counts.failed} failed{late}, "
        f"{counts.rejected} rejected for local memory",
        f"{counts.seconds:.0f} s with {workers} processes",
    ]
    for title, values in (
        ("failure", counts.messages),
        ("tensor-core instruction", counts.tensor_cores),
        ("blocks per multiprocessor", {f"{b} (limit: {why})": n for (b, why), n in counts.occupancies.items()}),
    ):
        for text, count in sorted(values.items(), key=lambda item: -item[1]):
            lines.append(f"  {title}: {text}: {count}")
    return lines
