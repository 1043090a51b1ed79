"""Which file an engine reads for one layer, and which files lie beside it in vain."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from moeopt.core.shape import ROLES, Role
from moeopt.engines.names import Engine, check_engine
from moeopt.errors import InvalidInputError
from moeopt.export.names import ConfigName, device_relatives, parse_version_directory, version_directory

How = Literal["exact", "fallback", "up_file", "missing"]
_MOST_NEAR_MISSES: Final = 8


@dataclass(frozen=True)
class RoleLookup:
    """What an engine does for one projection.

    Attributes:
        role: Which.
        asked: The path it looks for first.
        path: The file it reads, or None where it takes its default config.
        how: ``exact``: the file asked for; ``fallback``: of another Triton version (SGLang);
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
        root: What SGLANG_MOE_CONFIG_DIR or VLLM_TUNED_CONFIG_FOLDER has to name.
        name: The name that is asked for (up).
        up: For the up projection.
        down: For the down projection; vLLM reads up's file for it.
        near_misses: Files that look as if they were meant, nearest first.
        obstacles: Directory names that make SGLang's loader raise.
    """

    engine: Engine
    root: Path
    name: ConfigName
    up: RoleLookup
    down: RoleLookup
    near_misses: tuple[NearMiss, ...] = ()
    obstacles: tuple[str, ...] = field(default=())

    @property
    def tuned(self) -> bool:
        """Whether both projections have a file of this very Triton version."""
        return self.up.how == "exact" and self.down.how in (("exact",) if self.engine == "sglang" else ("up_file",))


def config_root(engine: str, directory: str | Path) -> Path:
    """The directory that the engine's environment variable has to name.

    For SGLang a ``configs`` directory, or one of its ``triton_X_Y_Z``, is taken for its root.
    """
    path = Path(directory)
    if check_engine(engine) == "sglang":
        if path.name.startswith("triton_") and path.parent.name == "configs":
            return path.parent.parent
        if path.name == "configs":
            return path.parent
    return path


def guess_engine(directory: str | Path) -> Engine:
    """Whose directory it is: SGLang's have ``triton_X_Y_Z`` directories.

    Raises:
        InvalidInputError: It is no directory.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InvalidInputError(f"{path} is no directory: give one with config files")
    inside = path if path.name == "configs" else path / "configs"
    if path.name.startswith("triton_") or (inside.is_dir() and any(inside.glob("triton_*"))):
        return "sglang"
    return "sglang" if any(_is_sglang(p.name) for p in path.glob("E=*.json")) else "vllm"


def find_config_files(engine: str, directory: str | Path, name: ConfigName, triton_version: str) -> Lookup:
    """What an engine reads from a directory for one layer.

    Args:
        engine: ``sglang`` or ``vllm``.
        directory: With the files; see :func:`config_root`.
        name: As :meth:`ConfigName.of` builds it.
        triton_version: Of the server (vLLM does not look at it).

    Raises:
        InvalidInputError: It is no directory.
    """
    engine = check_engine(engine)
    root = config_root(engine, directory)
    if not root.is_dir():
        raise InvalidInputError(f"{root} is no directory: give one with config files")
    name = name.for_role("up")
    obstacles: tuple[str, ...] = ()
    if engine == "vllm":
        asked = root / str(name)
        there = asked.is_file()
        up = RoleLookup("up", asked, asked if there else None, "exact" if there else "missing")
        down = RoleLookup("down", asked, up.path, "up_file" if there else "missing")
    else:
        up, down = (_sglang(root, name.for_role(role), role, triton_version) for role in ROLES)
        if down.how == "missing" and up.path is not None:
            down = RoleLookup("down", down.asked, up.path, "up_file", up.version)
        if up.how != "exact" or down.how != "exact":
            obstacles = tuple(d.name for d in _version_directories(root) if parse_version_directory(d.name) is None)
    read = {up.path, down.path}
    misses = _near_misses(engine, root, name, triton_version, read)
    return Lookup(engine, root, name, up, down, misses, obstacles)


def _sglang(root: Path, name: ConfigName, role: Role, triton_version: str) -> RoleLookup:
    exact = root / "configs" / version_directory(triton_version) / str(name)
    if exact.is_file():
        return RoleLookup(role, exact, exact, "exact")
    versions = [(v, d) for d in _version_directories(root) if (v := parse_version_directory(d.name)) is not None]
    for version, directory in sorted(versions, reverse=True):
        if (directory / str(name)).is_file():
            text = ".".join(map(str, version))
            return RoleLookup(role, exact, directory / str(name), "fallback", text)
    return RoleLookup(role, exact, None, "missing")


def _version_directories(root: Path) -> list[Path]:
    return sorted(d for d in (root / "configs").glob("triton_*") if d.is_dir())


def _near_misses(
    engine: Engine, root: Path, asked: ConfigName, triton_version: str, read: set[Path | None]
) -> tuple[NearMiss, ...]:
    found = []
    wanted_place = root / "configs" / version_directory(triton_version) if engine == "sglang" else root
    patterns = ("*.json", "configs/*.json", "configs/*/*.json", "*/*.json") if engine == "sglang" else ("*.json",)
    for path in sorted({p for pattern in patterns for p in root.glob(pattern)}):
        if path in read:
            continue
        try:
            name = ConfigName.parse(path.name)
        except InvalidInputError:
            continue
        reasons = _differences(asked, name)
        if engine == "sglang" and path.parent != wanted_place:
            version = parse_version_directory(path.parent.name)
            if version is None:
                reasons.append(f"it lies in {path.parent.name!r}, not in configs/{wanted_place.name}")
            else:
                reasons.append(f"it is of Triton {'.'.join(map(str, version))}, not {triton_version}")
        if reasons and (len(reasons) == 1 or (len(reasons) == 2 and _same_size(asked, name))):
            found.append(NearMiss(path, "; ".join(reasons), len(reasons)))
    found.sort(key=lambda miss: (miss.differences, miss.path.name, str(miss.path)))
    return tuple(found[:_MOST_NEAR_MISSES])


def _same_size(asked: ConfigName, name: ConfigName) -> bool:
    return (asked.num_experts, asked.intermediate_size) == (name.num_experts, name.intermediate_size)


def _differences(asked: ConfigName, name: ConfigName) -> list[str]:
    reasons = []
    if name.num_experts != asked.num_experts:
        reasons.append(_experts(asked.num_experts, name.num_experts))
    if name.intermediate_size != asked.intermediate_size:
        reasons.append(_size(asked.intermediate_size, name.intermediate_size))
    if name.device != asked.device:
        same = " (the same silicon under another name)" if name.device in device_relatives(asked.device) else ""
        reasons.append(f"it is for {name.device}, this GPU is {asked.device}{same}")
    if name.dtype != asked.dtype:
        reasons.append(f"it is for dtype {name.dtype or 'bf16'}, asked is {asked.dtype or 'bf16'}")
    if name.block_shape != asked.block_shape:
        reasons.append(f"its block_shape is {_block(name)}, asked is {_block(asked)}")
    elif name.engine != asked.engine and name.block_shape:
        reasons.append(f"its name is spelled as {name.engine} spells it: {asked.engine} asks for {asked}")
    if name.per_channel != asked.per_channel:
        reasons.append(
            "its name has per_channel_quant=True" if name.per_channel else "it has no per_channel_quant=True"
        )
    return reasons


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


def _is_sglang(name: str) -> bool:
    try:
        parsed = ConfigName.parse(name)
    except InvalidInputError:
        return False
    return parsed.engine == "sglang" and (parsed.down or parsed.per_channel or parsed.block_shape is not None)
