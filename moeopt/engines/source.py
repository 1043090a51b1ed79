"""Where the fused MoE kernel of SGLang or vLLM lies on this machine.

Nothing is imported here: an engine takes tens of seconds and a piece of the GPU to import, and all
but the process that launches need no more than its kernel file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from moeopt.errors import DeviceError, InvalidInputError


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known of an engine before it is looked for.

    Attributes:
        name: ``sglang`` or ``vllm``; also the package's name.
        title: As its makers write it.
        variable: Environment variable that names a kernel file or an unpacked tree.
        versions: The range that the adapter is tested with.
        paths: Where the kernel file has been, relative to the package, newest first.
    """

    name: str
    title: str
    variable: str
    versions: str
    paths: tuple[str, ...]


ENGINES: Final[Mapping[str, EngineInfo]] = {
    "sglang": EngineInfo(
        name="sglang",
        title="SGLang",
        variable="MOEOPT_SGLANG_KERNEL",
        versions="0.5.5 to 0.5.23",
        paths=(
            "kernels/ops/moe/fused_moe_triton_kernels.py",
            "srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_kernels.py",
            "srt/layers/moe/fused_moe_triton/fused_moe_triton_kernels.py",
        ),
    ),
    "vllm": EngineInfo(
        name="vllm",
        title="vLLM",
        variable="MOEOPT_VLLM_KERNEL",
        versions="0.11 to 0.33",
        paths=("model_executor/layers/fused_moe/fused_moe.py",),
    ),
}
_KERNEL_DEFINITION: Final = re.compile(r"^def fused_moe_kernel\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineSource:
    """One engine's kernel file.

    Attributes:
        engine: ``sglang`` or ``vllm``.
        path: The file that holds the kernel and its launch.
        version: The engine's version, or "" where only its file is there.
        source_hash: First 16 hex digits of the SHA-256 of the file.
        module: Under which name the installed package has it, or "" where only the file was named.
    """

    engine: str
    path: Path
    version: str
    source_hash: str
    module: str = ""


def find_engine(engine: str, path: str | Path | None = None) -> EngineSource:
    """The kernel file of an engine: of the path given, the environment variable, or the package.

    Args:
        engine: ``sglang`` or ``vllm``.
        path: A kernel file or an unpacked tree; None for the environment variable
            (``MOEOPT_SGLANG_KERNEL``, ``MOEOPT_VLLM_KERNEL``), else the installed package.

    Raises:
        InvalidInputError: The path or the variable names something that holds no such kernel.
        DeviceError: Neither the variable nor the package is there.
    """
    info = ENGINES[engine]
    if path is None:
        path = os.environ.get(info.variable) or None
        origin = f"{info.variable}={path}"
    else:
        origin = str(path)
    if path is not None:
        found = _in_tree(info, Path(path).expanduser())
        if found is None:
            raise InvalidInputError(
                f"{origin} holds no fused_moe_kernel of {info.title}: give its kernel file "
                f"(such as {info.name}/{info.paths[0]}) or a folder that holds the unpacked package"
            )
        return _source(info, found, _version_near(info, found))
    roots = _package_roots(info.name)
    for root in roots:
        found = _in_tree(info, root)
        if found is not None:
            source = _source(info, found, _installed_version(info) or _version_near(info, found))
            parts = found.relative_to(root).with_suffix("").parts
            return replace(source, module=".".join((info.name, *parts)))
    if roots:
        raise DeviceError(
            f"the installed {info.title} ({roots[0]}) holds no fused_moe_kernel where versions {info.versions} have "
            f"it ({info.name}/{info.paths[0]}): name the file with {info.variable}, or use kernel 'builtin'"
        )
    raise DeviceError(
        f"kernel {info.name!r} needs {info.title}, and no package {info.name!r} is installed here: install it, name "
        f"its kernel file with {info.variable}, or use kernel 'builtin'"
    )


def _source(info: EngineInfo, path: Path, version: str) -> EngineSource:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return EngineSource(engine=info.name, path=path.resolve(), version=version, source_hash=digest)


def _package_roots(package: str) -> list[Path]:
    """The folders of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def _in_tree(info: EngineInfo, path: Path) -> Path | None:
    """The kernel file: the path itself, or under it, where it has been or else wherever it is now."""
    if path.is_file():
        return path if _defines_kernel(path) else None
    for base in (path, path / info.name):
        for relative in info.paths:
            if (base / relative).is_file() and _defines_kernel(base / relative):
                return base / relative
    for found in sorted(path.rglob("fused_moe*.py")):
        if _defines_kernel(found):
            return found
    return None


def _defines_kernel(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # a folder of that name, a dead link, a file of another user
        return False
    return _KERNEL_DEFINITION.search(text) is not None


def _installed_version(info: EngineInfo) -> str:
    try:
        return importlib.metadata.version(info.name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _version_near(info: EngineInfo, path: Path) -> str:
    """The version of an unpacked tree, from its dist-info folder or its version file; "" if neither is there."""
    for parent in path.resolve().parents:
        if parent.name != info.name:
            continue
        for folder in sorted(parent.parent.glob(f"{info.name}-*.dist-info")):
            return folder.name.removeprefix(f"{info.name}-").removesuffix(".dist-info")
        for name in ("_version.py", "version.py"):
            file = parent / name
            match = file.is_file() and re.search(
                r"^(?:__version__|version)\b[^'\"\n]*['\"]([^'\"]+)['\"]",
                file.read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            if match:
                return match.group(1)
        break
    return ""
