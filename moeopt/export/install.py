"""Writes config files where an engine on this machine reads them."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.engines.names import Engine, check_engine
from moeopt.errors import ExportError
from moeopt.export.write import export_configs

VARIABLES: Final[Mapping[Engine, str]] = {
    "sglang": "SGLANG_MOE_CONFIG_DIR",
    "vllm": "VLLM_TUNED_CONFIG_FOLDER",
}
# Where releases of the engines keep their files, newest layout first.
_BUNDLED: Final[Mapping[Engine, tuple[str, ...]]] = {
    "sglang": ("srt/layers/moe/moe_runner/triton_utils", "srt/layers/moe/fused_moe_triton"),
    "vllm": ("model_executor/layers/fused_moe/configs",),
}


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

    engine: Engine
    directory: Path
    paths: tuple[Path, ...]
    said: str
    start: str


def bundled_directory(engine: str, package: str | Path | None = None) -> Path | None:
    """Where an installed engine keeps its own config files, or None where it is not installed here.

    Args:
        engine: ``sglang`` or ``vllm``.
        package: The engine's package directory; None looks it up without importing it.
    """
    engine = check_engine(engine)
    if package is None:
        spec = importlib.util.find_spec(engine)
        locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    else:
        locations = [str(package)]
    for location in locations:
        for inside in _BUNDLED[engine]:
            path = Path(location) / inside
            if (path / "configs" if engine == "sglang" else path).is_dir():
                return path
    return None


def install_configs(
    engine: str,
    shape: MoEShape,
    gpu_name: str,
    triton_version: str,
    up: Mapping[int, LaunchConfig],
    down: Mapping[int, LaunchConfig] | None,
    *,
    replace: bool = False,
    package: str | Path | None = None,
    model: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Installed:
    """Writes where the engine reads: the directory that its variable names, else its own, else moeopt's.

    SGLang's variable replaces the directory that it ships, so into any other directory the shipped
    files are linked: other models keep theirs. vLLM's folder comes on top of what it ships.

    Args:
        engine: ``sglang`` or ``vllm``.
        shape: The layer as one GPU sees it.
        gpu_name: As torch reports it.
        triton_version: Of the server.
        up: Batch size -> config of the up projection.
        down: The same for down, None in joint mode.
        replace: As in :func:`~moeopt.export.export_configs`.
        package: The engine's package directory where it is not importable here.
        model: Named in the line that starts the server.
        environment: Instead of the process's.

    Raises:
        ExportError: Nothing could be written, or the shipped files cannot be linked.
    """
    engine = check_engine(engine)
    values = os.environ if environment is None else environment
    bundled = bundled_directory(engine, package)
    if package is not None and bundled is None:
        raise ExportError(f"{package} is no {engine} package (it has no configs directory): name the directory of one")
    variable = VARIABLES[engine]
    named = values.get(variable)
    if named:
        directory, why, prefix = Path(named), f"{variable} is set", f"{variable}={shlex.quote(named)} "
    elif bundled is not None and _writable(bundled, engine):
        directory, why, prefix = bundled, f"beside the files that {engine} ships", ""
    else:
        directory = _own_directory(engine)
        what = "cannot be written" if bundled is not None else "is not installed here"
        why, prefix = f"{engine} {what}", f"{variable}={shlex.quote(str(directory))} "
    said = [f"wrote into {directory} ({why})"]
    paths = export_configs(engine, directory, shape, gpu_name, triton_version, up, down, replace=replace)
    if engine == "sglang" and bundled is not None and directory.resolve() != bundled.resolve():
        count = _link_bundled(bundled, directory)
        said.append(f"linked {count} files that SGLang ships, so that other models keep theirs")
    elif engine == "sglang" and bundled is None:
        said.append("SGLang reads no shipped file while the variable is set: give --engine-dir to have them linked")
    start = prefix + _start(engine, shape, model)
    return Installed(engine, directory, tuple(paths), "; ".join(said), start)


def start_line(engine: str, directory: str | Path, shape: MoEShape, model: str | None = None) -> str:
    """The one line that starts a server which reads the files in a directory."""
    engine = check_engine(engine)
    return f"{VARIABLES[engine]}={shlex.quote(str(Path(directory).absolute()))} {_start(engine, shape, model)}"


def _start(engine: Engine, shape: MoEShape, model: str | None) -> str:
    name = shlex.quote(model) if model else "MODEL"
    if engine == "vllm":
        return f"vllm serve {name} --moe-backend triton"
    line = f"python -m sglang.launch_server --model-path {name}"
    # Packed weights go to Marlin, which reads no file, unless they are loaded this way.
    if shape.dtype in ("int4_w4a16", "int8_w8a16"):
        return line + " --quantization moe_wna16"
    return line + " --moe-runner-backend triton"


def _writable(bundled: Path, engine: Engine) -> bool:
    return os.access(bundled / "configs" if engine == "sglang" else bundled, os.W_OK | os.X_OK)


def _own_directory(engine: Engine) -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("moeopt")) / "configs" / engine


def _link_bundled(bundled: Path, directory: Path) -> int:
    """Links what SGLang ships and the directory lacks; a file that is there stays."""
    count = 0
    for source in sorted((bundled / "configs").glob("triton_*/*.json")):
        target = directory / "configs" / source.parent.name / source.name
        try:
            if target.is_symlink() and not target.exists():
                target.unlink()  # of an SGLang that is gone
            if target.exists():
                count += int(target.is_symlink())
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.resolve())
        except OSError as error:
            raise ExportError(
                f"{target} cannot be linked to SGLang's own file ({error.strerror or error}): "
                f"copy {bundled / 'configs'} into {directory} by hand"
            ) from None
        count += 1
    return count
