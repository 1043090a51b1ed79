"""Writes config files where an engine on this machine reads them."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeopt import engines
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.engines import EngineSpec
from moeopt.engines.serving import Checkpoint
from moeopt.errors import ExportError
from moeopt.export.write import export_configs


@dataclass(frozen=True)
class Installed:
    """What was written, and how to have it read.

    Attributes:
        engine: Which.
        directory: What the engine's environment variable names, or its own directory.
        paths: The written files.
        said: One line: where the files are and what became of the files that the engine ships.
        start: The one line that starts a server which reads them.
    """

    engine: str
    directory: Path
    paths: tuple[Path, ...]
    said: str
    start: str


def bundled_directory(engine: str, package: str | Path | None = None) -> Path | None:
    """Where an installed engine keeps its own config files, or None where it is not installed here.

    Args:
        engine: Its name.
        package: The engine's package directory; None looks it up without importing it.
    """
    spec = engines.get(engine)
    if package is None:
        found = importlib.util.find_spec(engine)
        locations = list(found.submodule_search_locations or ()) if found is not None else []
    else:
        locations = [str(package)]
    for location in locations:
        for inside in spec.bundled:
            path = Path(location) / inside
            if spec.layout.shelf(path).is_dir():
                return path
    return None


def install_configs(
    engine: str,
    shape: MoEShape,
    gpu_name: str,
    triton_version: str,
    table: ConfigTable,
    *,
    replace: bool = False,
    package: str | Path | None = None,
    model: str | None = None,
    checkpoint: Checkpoint | None = None,
    environment: Mapping[str, str] | None = None,
) -> Installed:
    """Writes where the engine reads: the directory that its variable names, else its own, else moeopt's.

    Where the variable's directory replaces the one that the engine ships, the shipped files are linked
    into any other directory: other models keep theirs.

    Args:
        engine: Its name.
        shape: The layer as one GPU sees it.
        gpu_name: As torch reports it.
        triton_version: Of the server.
        table: The configs of each batch size.
        replace: As in :func:`~moeopt.export.export_configs`.
        package: The engine's package directory where it is not importable here.
        model: Named in the line that starts the server.
        checkpoint: What the engine picks its kernel by; None for a checkpoint of which only the shape is known.
        environment: Instead of the process's.

    Raises:
        ExportError: Nothing could be written, or the shipped files cannot be linked.
    """
    spec = engines.get(engine)
    values = os.environ if environment is None else environment
    bundled = bundled_directory(engine, package)
    if package is not None and bundled is None:
        raise ExportError(
            f"{package} is not a package of {engine} (it has no configs directory): name the directory of one"
        )
    directory, why = _directory(spec, bundled, values.get(spec.variable))
    said = [f"wrote into {directory} ({why})"]
    paths = export_configs(engine, directory, shape, gpu_name, triton_version, table, replace=replace)
    if spec.replaces_bundled and bundled is None:
        said.append(
            f"{spec.title} reads no shipped file while the variable is set: give --engine-dir to have them linked"
        )
    elif spec.replaces_bundled and bundled is not None and directory.resolve() != bundled.resolve():
        count = _link_bundled(spec, bundled, directory)
        said.append(f"linked {count} files that {spec.title} ships, so that other models keep theirs")
    named = shlex.quote(str(directory)) if directory != bundled or values.get(spec.variable) else None
    start = spec.start(model, spec.serving.option(checkpoint or Checkpoint(shape), None), directory=named)
    return Installed(engine, directory, tuple(paths), "; ".join(said), start)


def _directory(spec: EngineSpec, bundled: Path | None, named: str | None) -> tuple[Path, str]:
    """Where to write, and why there."""
    if named:
        return Path(named), f"{spec.variable} is set"
    if bundled is not None and os.access(spec.layout.shelf(bundled), os.W_OK | os.X_OK):
        return bundled, f"beside the files that {spec.name} ships"
    import platformdirs

    what = "cannot be written" if bundled is not None else "is not installed here"
    return Path(platformdirs.user_data_dir("moeopt")) / "configs" / spec.name, f"{spec.name} {what}"


def start_line(
    engine: str,
    directory: str | Path,
    shape: MoEShape,
    model: str | None = None,
    checkpoint: Checkpoint | None = None,
) -> str:
    """The one line that starts a server which reads the files in a directory."""
    spec = engines.get(engine)
    option = spec.serving.option(checkpoint or Checkpoint(shape), None)
    return spec.start(model, option, directory=shlex.quote(str(Path(directory).absolute())))


def _link_bundled(spec: EngineSpec, bundled: Path, directory: Path) -> int:
    """Links what the engine ships and the directory lacks; a file that is there stays."""
    count = 0
    shelves = spec.layout.version_folders(bundled) if spec.layout.versioned else [bundled]
    for source in sorted(file for shelf in shelves for file in shelf.glob("*.json")):
        target = directory / source.relative_to(bundled)
        try:
            if target.is_symlink() and not target.exists():
                target.unlink()  # of an engine that is gone
            if target.exists():
                count += int(target.is_symlink())
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.resolve())
        except OSError as error:
            raise ExportError(
                f"{target} cannot be linked to {spec.title}'s own file ({error.strerror or error}): "
                f"copy {spec.layout.shelf(bundled)} into {directory} by hand"
            ) from None
        count += 1
    return count
