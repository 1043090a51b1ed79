"""Lookup of the file that an engine reads for one layer, and of files that lie beside it in vain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from moeopt import engines
from moeopt.core.shape import ROLES, Role
from moeopt.engines import EngineSpec
from moeopt.errors import InvalidInputError
from moeopt.export.names import ConfigName, device_relatives, spelled_by

How = Literal["exact", "fallback", "up_file", "missing"]
_MOST_NEAR_MISSES: Final = 8


@dataclass(frozen=True)
class RoleLookup:
    """What an engine does for one projection.

    Attributes:
        role: Which.
        asked: The path it looks for first.
        path: The file it reads, or None where it takes its default config.
        how: ``exact``: the file asked for; ``fallback``: of another Triton version;
            ``up_file``: up's file serves down, too; ``missing``: none.
        version: The Triton version of a fallback.
    """

    role: Role
    asked: Path
    path: Path | None
    how: How
    version: str | None = None


@dataclass(frozen=True)
class NearMiss:
    """A file that is not read.

    Attributes:
        path: Where it is.
        why: How its name differs from what is asked for, in one line.
        differences: How many things differ.
    """

    path: Path
    why: str
    differences: int = 1


@dataclass(frozen=True)
class Lookup:
    """What an engine finds in a directory for one layer.

    Attributes:
        engine: Which.
        root: What the engine's variable has to name.
        name: The name that is asked for (up).
        up: For the up projection.
        down: For the down projection, which may have up's file.
        near_misses: Files that look as if they were meant, nearest first.
        obstacles: Directory names that make the engine's loader raise.
    """

    engine: str
    root: Path
    name: ConfigName
    up: RoleLookup
    down: RoleLookup
    near_misses: tuple[NearMiss, ...] = ()
    obstacles: tuple[str, ...] = field(default=())

    @property
    def tuned(self) -> bool:
        """Whether both projections have a file of this very Triton version."""
        return self.up.how == "exact" and self.down.how == ("exact" if engines.get(self.engine).split else "up_file")


def config_root(engine: str, directory: str | Path) -> Path:
    """The directory that the engine's environment variable has to name for the files in or below this one."""
    return engines.get(engine).layout.root(Path(directory))


def guess_engine(directory: str | Path) -> str:
    """Whose directory it is: by directories that only one engine has, else by names that only one spells so.

    Files may lie a directory below: people copy them one level off.

    Raises:
        InvalidInputError: It is not a directory.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InvalidInputError(f"{path} is not a directory: give one with config files")
    for spec in engines.every():
        if spec.layout.marks(path):
            return spec.name
    files = [*path.glob("*.json"), *path.glob("*/*.json")]
    spellers = [spelled_by(file.name) for file in files]
    alone = {specs[0].name for specs in spellers if len(specs) == 1}
    flat = [spec.name for spec in engines.every() if not spec.layout.versioned]
    return next((name for name in (*engines.names(), *flat) if name in alone), flat[0])


def find_config_files(engine: str, directory: str | Path, name: ConfigName, triton_version: str) -> Lookup:
    """What an engine reads from a directory for one layer.

    Args:
        engine: Its name.
        directory: With the files; see :func:`config_root`.
        name: As :meth:`ConfigName.of` builds it.
        triton_version: Of the server, where the engine looks at it.

    Raises:
        InvalidInputError: It is not a directory.
    """
    spec = engines.get(engine)
    root = config_root(engine, directory)
    if not root.is_dir():
        raise InvalidInputError(f"{root} is not a directory: give one with config files")
    name = name.for_role("up")
    up, down = (_find(spec, root, name.for_role(role), role, triton_version) for role in ROLES)
    if up.path is not None and (down.how == "missing" or not spec.split):
        down = RoleLookup("down", down.asked, up.path, "up_file", up.version)
    obstacles: tuple[str, ...] = ()
    if up.how != "exact" or down.how != "exact":
        folders = [d.name for d in spec.layout.version_folders(root)]
        obstacles = tuple(folder for folder in folders if spec.layout.version_of(folder) is None)
    misses = _near_misses(spec, root, name, triton_version, {up.path, down.path})
    return Lookup(engine, root, name, up, down, misses, obstacles)


def _find(spec: EngineSpec, root: Path, name: ConfigName, role: Role, triton_version: str) -> RoleLookup:
    exact = spec.layout.place(root, triton_version) / str(name)
    if exact.is_file():
        return RoleLookup(role, exact, exact, "exact")
    folders = spec.layout.version_folders(root)
    versions = [(v, d) for d in folders if (v := spec.layout.version_of(d.name)) is not None]
    for version, directory in sorted(versions, reverse=True):
        if (directory / str(name)).is_file():
            text = ".".join(map(str, version))
            return RoleLookup(role, exact, directory / str(name), "fallback", text)
    return RoleLookup(role, exact, None, "missing")


def _near_misses(
    spec: EngineSpec, root: Path, asked: ConfigName, triton_version: str, read: set[Path | None]
) -> tuple[NearMiss, ...]:
    found = []
    wanted_place = spec.layout.place(root, triton_version)
    folders = (*spec.layout.folders, "*/")
    for path in sorted({path for folder in folders for path in root.glob(f"{folder}*.json")}):
        if path in read:
            continue
        name = _parsed(path.name, spec.name) or _parsed(path.name, None)
        if name is None:
            continue
        reasons = _differences(asked, name)
        if path.parent != wanted_place:
            version = spec.layout.version_of(path.parent.name)
            if version is not None:
                reasons.append(f"it is of Triton {'.'.join(map(str, version))}, not {triton_version}")
            elif spec.layout.versioned:
                place = wanted_place.relative_to(root).as_posix()
                reasons.append(f"it lies in {path.parent.name!r}, not in {place}")
            else:
                reasons.append(f"it lies in {path.parent.name!r}: {spec.variable} has to name that directory")
        if reasons and (len(reasons) == 1 or (len(reasons) == 2 and _same_size(asked, name))):
            found.append(NearMiss(path, "; ".join(reasons), len(reasons)))
    found.sort(key=lambda miss: (miss.differences, miss.path.name, str(miss.path)))
    return tuple(found[:_MOST_NEAR_MISSES])


def _parsed(text: str, engine: str | None) -> ConfigName | None:
    try:
        return ConfigName.parse(text, engine)
    except InvalidInputError:
        return None


def _same_size(asked: ConfigName, name: ConfigName) -> bool:
    return (asked.num_experts, asked.intermediate_size) == (name.num_experts, name.intermediate_size)


def _differences(asked: ConfigName, name: ConfigName) -> list[str]:
    reasons = []
    there, wanted = (n.num_experts * n.intermediate_size for n in (name, asked))
    if there == wanted and name.num_experts != asked.num_experts:
        spread = "expert" if name.num_experts < asked.num_experts else "tensor"
        reasons.append(
            f"E is {name.num_experts} and N {name.intermediate_size}, asked are {asked.num_experts} and "
            f"{asked.intermediate_size}: the same layer, laid out by {spread} parallelism"
        )
    else:
        if name.num_experts != asked.num_experts:
            reasons.append(_experts(asked.num_experts, name.num_experts))
        if name.intermediate_size != asked.intermediate_size:
            reasons.append(_size(asked.intermediate_size, name.intermediate_size))
    if name.device != asked.device:
        same = " (the same silicon under another name)" if name.device in device_relatives(asked.device) else ""
        reasons.append(f"it is for {name.device}, this GPU is {asked.device}{same}")
    if name.dtype != asked.dtype:
        reasons.append(f"it is for {_weights(name)}, asked is one for {_weights(asked)}")
    if name.block_shape != asked.block_shape:
        reasons.append(f"its block_shape is {_block(name)}, asked is {_block(asked)}")
    elif name.engine != asked.engine and name.block_shape:
        reasons.append(f"its name is spelled as {name.engine} spells it: {asked.engine} asks for {asked}")
    if name.per_channel != asked.per_channel:
        reasons.append(
            "its name has per_channel_quant=True" if name.per_channel else "it has no per_channel_quant=True"
        )
    return reasons


def _weights(name: ConfigName) -> str:
    return f"dtype {name.dtype}" if name.dtype else "no dtype in the name (16-bit weights)"


def _block(name: ConfigName) -> str:
    return str(list(name.block_shape)) if name.block_shape else "none"


def _experts(asked: int, there: int) -> str:
    why = ""
    if there == asked + 1:
        why = " (with a fused shared expert)"
    elif there == asked - 1:
        why = " (without the fused shared expert)"
    elif there % asked == 0 or asked % there == 0:
        why = " (another expert-parallel size)"
    return f"E is {there}, asked is {asked}{why}"


def _size(asked: int, there: int) -> str:
    why = ""
    if there == 2 * asked:
        why = " (twice: gate and up counted together, or half the tensor-parallel size)"
    elif there and asked and (there % asked == 0 or asked % there == 0):
        why = " (another tensor-parallel size)"
    return f"N is {there}, asked is {asked}{why}"
