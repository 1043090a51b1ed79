"""Kernel files of the engines on this machine.

Nothing is imported here: an engine takes tens of seconds and a piece of the GPU to import, and all
but the process that launches need no more than its kernel file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from moeopt.engines.registry import get
from moeopt.engines.spec import EngineSpec
from moeopt.errors import DeviceError, InvalidInputError

_KERNEL_DEFINITION: Final = re.compile(r"^def fused_moe_kernel\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineSource:
    """One engine's kernel file.

    Attributes:
        engine: Its name.
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
        engine: Its name.
        path: A kernel file or an unpacked tree; None for the engine's environment variable (such as
            ``MOEOPT_SGLANG_KERNEL``), else the installed package.

    Raises:
        InvalidInputError: The path or the variable names something that holds no such kernel.
        DeviceError: Neither the variable nor the package is there.
    """
    spec = get(engine)
    kernel = spec.kernel
    if path is None:
        path = os.environ.get(kernel.variable) or None
        origin = f"{kernel.variable}={path}"
    else:
        origin = str(path)
    if path is not None:
        found = _in_tree(spec, Path(path).expanduser())
        if found is None:
            raise InvalidInputError(
                f"{origin} holds no fused_moe_kernel of {spec.title}: give its kernel file "
                f"(such as {spec.name}/{kernel.paths[0]}) or a folder that holds the unpacked package"
            )
        return _source(spec, found, _version_near(spec, found))
    roots = _package_roots(spec.name)
    for root in roots:
        found = _in_tree(spec, root)
        if found is not None:
            source = _source(spec, found, _installed_version(spec) or _version_near(spec, found))
            parts = found.relative_to(root).with_suffix("").parts
            return replace(source, module=".".join((spec.name, *parts)))
    if roots:
        raise DeviceError(
            f"the installed {spec.title} ({roots[0]}) holds no fused_moe_kernel where versions {kernel.versions} have "
            f"it ({spec.name}/{kernel.paths[0]}): name the file with {kernel.variable}, or use kernel 'builtin'"
        )
    raise DeviceError(
        f"kernel {spec.name!r} needs {spec.title}, and no package {spec.name!r} is installed here: install it, name "
        f"its kernel file with {kernel.variable}, or use kernel 'builtin'"
    )


def _source(spec: EngineSpec, path: Path, version: str) -> EngineSource:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return EngineSource(engine=spec.name, path=path.resolve(), version=version, source_hash=digest)


def _package_roots(package: str) -> list[Path]:
    """The folders of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def _in_tree(spec: EngineSpec, path: Path) -> Path | None:
    """The kernel file: the path itself, or under it, where it has been or else wherever it is now."""
    if path.is_file():
        return path if _defines_kernel(path) else None
    for base in (path, path / spec.name):
        for relative in spec.kernel.paths:
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


def _installed_version(spec: EngineSpec) -> str:
    try:
        return importlib.metadata.version(spec.name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _version_near(spec: EngineSpec, path: Path) -> str:
    """The version of an unpacked tree, from its dist-info folder or its version file; "" if neither is there."""
    for parent in path.resolve().parents:
        if parent.name != spec.name:
            continue
        for folder in sorted(parent.parent.glob(f"{spec.name}-*.dist-info")):
            return folder.name.removeprefix(f"{spec.name}-").removesuffix(".dist-info")
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
