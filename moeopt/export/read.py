"""Reads config files back and says, in one line a problem, what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from moeopt import engines
from moeopt.core.config import PARAMETERS, LaunchConfig
from moeopt.core.dtypes import DTYPES
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import illegal_reason
from moeopt.core.shape import MoEShape
from moeopt.engines import EngineSpec
from moeopt.engines.spec import TRITON_STAGES, TRITON_WARPS
from moeopt.errors import InvalidInputError, UnknownGpuError
from moeopt.export.names import ConfigName, nearest_key

Severity = Literal["error", "warning", "note"]
_Found = tuple[Severity, str, str]


class _Add(Protocol):
    """Notes what is wrong: of the whole file, or of one batch size."""

    def __call__(self, severity: Severity, code: str, message: str, batch_size: int | None = None) -> None: ...


# Batch sizes up to here are looked at where two files are compared; chunks of prefill are seldom larger.
LARGEST_BATCH: Final = 8192
_ASKED_FOR: Final = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
# What Triton takes where an entry does not say.
_TRITON_DEFAULTS: Final = {"num_warps": TRITON_WARPS, "num_stages": TRITON_STAGES}
_POWERS_OF_TWO: Final = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")
# Keys that a maker's GPUs alone know, by the beginning of their names.
_OTHER_MAKERS: Final = {
    "AMD": frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack"}),
    "Intel": frozenset({"grf_mode"}),
}
# A name has no group_size; what a config needs of a GPU does not depend on it.
_ANY_GROUP: Final = 128


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file.

    Attributes:
        severity: ``error``: the engine fails, computes wrong numbers or never reads the file;
            ``warning``: it runs something else or something slower than the file says; ``note``: worth knowing.
        code: A short word for programs.
        message: One line: what was found, what was expected, what to do.
        path: The file.
        batch_size: The entry, or None for the whole file.
    """

    severity: Severity
    code: str
    message: str
    path: Path
    batch_size: int | None = None

    def __str__(self) -> str:
        where = self.path.name if self.batch_size is None else f"{self.path.name}: batch size {self.batch_size}"
        return f"{where}: {self.message}"


@dataclass(frozen=True)
class ConfigFile:
    """What a config file holds.

    Attributes:
        path: Where it is.
        engine: Whose rules it was read by, or None where even the name does not tell.
        name: What its name says, or None where no engine reads such a name.
        entries: Batch size -> entry as it is in the file, in the order of the file; only entries that are objects.
        triton_version: What the engine's tuner noted in it, or None.
        problems: What is wrong.
    """

    path: Path
    engine: str | None
    name: ConfigName | None
    entries: Mapping[int, Mapping[str, Any]]
    triton_version: str | None
    problems: tuple[Problem, ...]

    @property
    def usable(self) -> bool:
        """Whether an engine can read it and run all of its entries."""
        return not any(p.severity == "error" for p in self.problems)

    def configs(self) -> dict[int, LaunchConfig]:
        """The entries as launch configs, in the order of the file; absent warps and stages are Triton's 4 and 3.

        Raises:
            InvalidInputError: An entry cannot be used.
        """
        fixed = engines.get(self.engine).fixed_keys if self.engine is not None else ()
        return {m: to_config(entry, fixed) for m, entry in self.entries.items()}

    def nearest(self, batch_size: int) -> Mapping[str, Any]:
        """The entry that the engine uses for a batch size, as it is in the file."""
        return self.entries[nearest_key(list(self.entries), batch_size)]


def to_config(entry: Mapping[str, Any], fixed: Collection[str] = ()) -> LaunchConfig:
    """One entry as a launch config; ``num_ctas: 1`` says nothing and is dropped, as is what the engine sets itself.

    Raises:
        InvalidInputError: A key or value cannot be used.
    """
    values = {k: v for k, v in entry.items() if k not in fixed and not (k == "num_ctas" and v == 1)}
    return LaunchConfig.from_dict({**_TRITON_DEFAULTS, **values})


def read_config_file(path: str | Path, *, engine: str | None = None, gpu: GpuSpec | None = None) -> ConfigFile:
    """Reads and checks one file.

    Args:
        path: The file.
        engine: Whose file it is; None goes by the spelling of its name and by where it lies.
        gpu: The GPU that its configs must run on; None takes the one of the file's name where that is known.

    Raises:
        InvalidInputError: The file is not there or cannot be read at all. What is wrong inside is in
            ``problems``.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read ({error.strerror or error}): give a config file") from None
    if engine is None:
        engine = next((s.name for s in engines.every() if s.layout.is_version(path.parent.name)), None)
    problems: list[Problem] = []

    def add(severity: Severity, code: str, message: str, batch_size: int | None = None) -> None:
        problems.append(Problem(severity, code, message, path, batch_size))

    name = _name(path.name, engine, add)
    engine = name.engine if name is not None else engine
    spec = engines.get(engine) if engine is not None else None
    if spec is not None and spec.layout.versioned and spec.layout.version_of(path.parent.name) is None:
        add("error", "place", f"it lies in {path.parent.name!r}: {spec.title} looks in {spec.layout.example} only")
    data = _load(raw, add)
    noted_version = str(data.pop("triton_version")) if "triton_version" in data else None
    if noted_version is not None and spec is not None and not spec.notes_triton_version:
        add("error", "triton_version", f"key 'triton_version' makes {spec.title} raise ValueError: remove it")
    entries = _entries(data, add)
    if data and not entries and not problems:
        add("error", "empty", "holds no batch sizes: tune it again")
    if gpu is None and name is not None:
        gpu = _gpu_of(name)
    shape = _shape_of(name) if name is not None else None
    for batch_size, entry in entries.items():
        for severity, code, message in check_entry(entry, spec, name, shape, gpu):
            add(severity, code, message, batch_size)
    if len(entries) == 1:
        message = f"has one batch size, {next(iter(entries))}: the engine uses it for every other one, too"
        add("note", "one_key", message)
    return ConfigFile(path, engine, name, entries, noted_version, tuple(problems))


def check_entry(
    entry: Mapping[str, Any],
    spec: EngineSpec | None,
    name: ConfigName | None,
    shape: MoEShape | None,
    gpu: GpuSpec | None,
) -> Iterator[_Found]:
    """What is wrong with one entry, as (severity, code, message); by the rules of all engines where none is known."""
    other = name is not None and not name.device.startswith("NVIDIA")
    maker = next((m for m in _OTHER_MAKERS if name is not None and name.device.startswith(m)), None)
    yield from _unknown_keys(entry, spec, maker if other else "NVIDIA")
    bad = list(_bad_values(entry))
    yield from bad
    if bad:
        return
    for engine in engines.every():
        for key, value in engine.fixed_keys.items():
            if entry.get(key, value) != value:
                yield "warning", key.lower(), f"{key} is {entry[key]}: {engine.title} runs {value}"
    if name is not None and name.block_shape:
        yield from _against_block_k(entry["BLOCK_SIZE_K"], name.block_shape[1], spec)
    if shape is not None and gpu is not None and not other:
        yield from _against_gpu(entry, shape, gpu)


def _name(text: str, engine: str | None, add: _Add) -> ConfigName | None:
    try:
        name = ConfigName.parse(text, engine)
    except InvalidInputError as error:
        add("error", "name", str(error))
        return None
    words = engines.get(name.engine).names.known_words
    if name.dtype not in words:
        known = ", ".join(sorted(filter(None, words)))
        add("error", "name", f"{name.engine} never asks for dtype={name.dtype}: it knows {known}, and none for bf16")
    return name


def _entries(data: Mapping[str, Any], add: _Add) -> dict[int, Mapping[str, Any]]:
    entries: dict[int, Mapping[str, Any]] = {}
    for key, value in data.items():
        # What int() takes beyond plain digits ("1_000", " 64 ") is not worth being clever about.
        batch_size = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else 0
        if batch_size < 1:
            add("error", "key", f"key {key!r} is not a batch size: the loader raises; give whole numbers of at least 1")
        elif not isinstance(value, dict):
            message = f"is {json.dumps(value)[:60]}: give an object with BLOCK_SIZE_M and so on"
            add("error", "entry", message, batch_size)
        else:
            entries[batch_size] = value
    return entries


def _unknown_keys(entry: Mapping[str, Any], spec: EngineSpec | None, maker: str | None) -> Iterator[_Found]:
    """Keys that the engine does not know, or that only another maker's GPUs do (None is one that is not known)."""
    allowed = spec.keys if spec is not None else _all_keys()
    for key in entry:
        owner = next((m for m, keys in _OTHER_MAKERS.items() if key in keys), None)
        if owner is not None and maker is not None and owner != maker:
            message = f"key {key!r} is for {owner} GPUs: an {maker} GPU's launch fails; it is a wrong file"
            yield "error", "unknown_key", message
        elif key not in allowed and owner is None:
            whom = spec.name if spec is not None else " and ".join(engines.names())
            known = ", ".join(k for k in PARAMETERS if k in allowed)
            yield "error", "unknown_key", f"key {key!r} is unknown to {whom}: it takes {known}"


def _bad_values(entry: Mapping[str, Any]) -> Iterator[_Found]:
    for key in _ASKED_FOR:
        if key not in entry:
            yield "error", "missing_key", f"key {key!r} is missing: the launch fails; tune it again"
    known = _all_keys()
    for key, value in entry.items():
        row = PARAMETERS.get(key)
        least = 1 if row is None or row.required else 0
        if row is not None and row.switch:
            if not isinstance(value, bool):
                yield "error", "value", f"{key} is {json.dumps(value)[:40]}: give true or false"
        elif key in known and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            yield "error", "value", f"{key} is {json.dumps(value)[:40]}: give a whole number of at least {least}"
        elif key in _POWERS_OF_TWO and value & (value - 1):
            yield "error", "value", f"{key} is {value}: Triton takes powers of two only"


def _against_block_k(value: int, block_k: int, spec: EngineSpec | None) -> Iterator[_Found]:
    if spec is not None and spec.clamps_block_k and value > block_k:
        message = f"BLOCK_SIZE_K {value} is over block_k {block_k}: {spec.title} runs {block_k} instead"
        yield "warning", "block_k", message
    elif value > block_k or block_k % value:
        message = f"BLOCK_SIZE_K {value} does not divide block_k {block_k}: the numbers come out wrong"
        yield "error", "block_k", message


def _against_gpu(entry: Mapping[str, Any], shape: MoEShape, gpu: GpuSpec) -> Iterator[_Found]:
    config = LaunchConfig.from_dict({**_TRITON_DEFAULTS, **{k: v for k, v in entry.items() if k in PARAMETERS}})
    # A BLOCK_SIZE_K over block_k has its own line.
    if shape.block_shape and config.block_size_k > shape.block_shape[1]:
        return
    reason = illegal_reason(config, shape, "up", gpu)
    # What weight-only kernels need in shared memory depends on how Triton unpacks the weights.
    if reason and not shape.spec.weight_only:
        yield "error", "cannot_run", f"{config} {reason}: the file is of another GPU or dtype than its name says"
    elif reason:
        yield "warning", "cannot_run", f"{config} probably {reason}: the launch may fail; tune on this GPU"


def _all_keys() -> frozenset[str]:
    return frozenset[str]().union(*(spec.keys for spec in engines.every()))


def check_pair(up: ConfigFile, down: ConfigFile) -> list[Problem]:
    """Where an engine with a file for each projection would pair configs that differ in BLOCK_SIZE_M.

    It then runs the down config with up's BLOCK_SIZE_M: something that nobody measured.
    """
    if not up.entries or not down.entries:
        return []
    clashes = [
        m
        for m in range(1, LARGEST_BATCH + 1)
        if up.nearest(m).get("BLOCK_SIZE_M") != down.nearest(m).get("BLOCK_SIZE_M")
    ]
    if not clashes:
        return []
    first, title = clashes[0], engines.get(down.engine or engines.DEFAULT).title
    message = (
        f"BLOCK_SIZE_M is {up.nearest(first).get('BLOCK_SIZE_M')} for up and "
        f"{down.nearest(first).get('BLOCK_SIZE_M')} for down at M={first} ({len(clashes):,} of {LARGEST_BATCH:,} "
        f"batch sizes): {title} runs down with up's value, which was not measured; export both together"
    )
    return [Problem("warning", "block_m", message, down.path, nearest_key(list(down.entries), first))]


def _load(raw: bytes, add: _Add) -> dict[str, Any]:
    def pairs(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        seen = [key for key, _ in items]
        for key in dict.fromkeys(k for k in seen if seen.count(k) > 1):
            add("warning", "repeated", f"key {key!r} is there {seen.count(key)} times: the last one counts")
        return dict(items)

    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        what = "is empty" if not raw.strip() else f"is not JSON ({str(error).splitlines()[0]})"
        add("error", "json", f"{what}: copy or tune it again")
        return {}
    if not isinstance(data, dict) or not data:
        add("error", "json", "holds no JSON object of batch sizes: copy or tune it again")
        return {}
    return data


def _gpu_of(name: ConfigName) -> GpuSpec | None:
    try:
        return GpuSpec.by_name(name.device)
    except UnknownGpuError:
        return None


def _shape_of(name: ConfigName) -> MoEShape | None:
    """A shape with the dtype and block shape of the name: what a config needs of a GPU depends on no more."""
    dtype = name.dtype or ("int8_w8a8" if name.block_shape else "bf16")
    spec = DTYPES.get(dtype)
    try:
        return MoEShape(
            num_experts=max(name.num_experts, 1),
            top_k=1,
            hidden_size=max(name.intermediate_size, 1),
            intermediate_size=max(name.intermediate_size, 1),
            dtype=dtype,
            block_shape=name.block_shape,
            group_size=_ANY_GROUP if spec and spec.scales == ("group",) else None,
        )
    except InvalidInputError:
        return None
