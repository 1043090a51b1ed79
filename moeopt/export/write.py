"""Writes and merges config files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeopt import engines
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.table import ConfigTable
from moeopt.engines import EngineSpec
from moeopt.errors import ExportError, InvalidInputError
from moeopt.export.names import ConfigName, nearest_key
from moeopt.export.read import read_config_file
from moeopt.files import LockFile, replace_file

# Marks a directory of suggestions.
MARKER: Final = "UNMEASURED.json"
# While files are merged: two exports into one directory would drop each other's batch sizes.
_LOCK: Final = ".moeopt.lock"

Entries = dict[int, dict[str, Any]]


def export_configs(
    engine: str,
    directory: str | os.PathLike[str],
    shape: MoEShape,
    gpu_name: str,
    triton_version: str,
    table: ConfigTable,
    *,
    replace: bool = False,
    unmeasured: bool = False,
) -> list[Path]:
    """Writes the config files of one shape, or merges them into those that are there.

    ``directory`` is what the engine's variable names. Where the engine reads a file for each role, the
    down file is written in joint mode, too: without one SGLang warns, and takes an old down file of
    another Triton version if there is one.

    Every file is written to a temporary file beside it and moved into place, so a reader sees the old
    one or the new one.

    Args:
        engine: Its name.
        directory: Made if it is not there.
        shape: The layer as one GPU sees it.
        gpu_name: As torch reports it.
        triton_version: Of the server.
        table: The configs of each batch size.
        replace: Write only these batch sizes and drop what is in the files. Otherwise other batch
            sizes are kept.
        unmeasured: These are suggestions of a cost model, and the directory is marked as such. Without it
            a marked directory is refused.

    Returns:
        The written paths, up first.

    Raises:
        ExportError: The configs are not what the engine can use, an existing file is broken, or the
            directory cannot be written.
    """
    spec = engines.get(engine)
    try:
        names = [ConfigName.of(engine, shape, gpu_name, role) for role in ROLES]
    except InvalidInputError as error:
        raise ExportError(str(error)) from None
    new_up, new_down = _checked(spec, shape, table)
    root = Path(directory)
    if not unmeasured:
        refuse_unmeasured(root)
    elif not (root / MARKER).exists():
        how = "write them with moeopt suggest, into a new directory"
        raise ExportError(f"{root} is not marked as holding unmeasured configs ({MARKER}): {how}")
    target = spec.layout.place(root, triton_version)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with LockFile(target / _LOCK):
            return _write_pair(spec, target, names, triton_version, new_up, new_down, replace)
    except OSError as error:
        raise ExportError(
            f"{target} cannot be written ({error.strerror or error}): give a directory you can write"
        ) from None


def refuse_unmeasured(directory: Path) -> None:
    """Raises ExportError where a directory holds suggestions: what was measured must not mix with them.

    Files may lie two directories below the marker, and those of two engines have the same names.
    """
    whole = directory.absolute().resolve()
    for marked in (whole, *whole.parents[:2]):
        if (marked / MARKER).exists():
            raise ExportError(
                f"{directory if marked == whole else marked} holds unmeasured suggestions ({MARKER}), which measured "
                "configs must not mix with: give another directory"
            )


def _write_pair(
    spec: EngineSpec,
    target: Path,
    names: list[ConfigName],
    triton_version: str,
    up: Entries,
    down: Entries,
    replace: bool,
) -> list[Path]:
    paths = [target / str(name) for name in names]
    old_up, extra = ({}, {}) if replace else _existing(paths[0], spec.name, triton_version)
    if not spec.split:
        replace_file(paths[0], _text({**old_up, **up}, extra))
        return paths[:1]
    old_down, _ = ({}, {}) if replace else _existing(paths[1], spec.name, triton_version)
    merged_up, merged_down = _merge_pair(old_up, old_down, up, down)
    replace_file(paths[1], _text(merged_down))
    replace_file(paths[0], _text(merged_up))
    return paths


def _merge_pair(old_up: Entries, old_down: Entries, up: Entries, down: Entries) -> tuple[Entries, Entries]:
    """Both files with the same batch sizes; what is not new stays what the engine used before.

    The engine takes the nearest batch size in each file, so files with different batch sizes would
    pair configs that do not belong together.
    """
    merged_up: Entries = {}
    merged_down: Entries = {}
    for m in {*old_up, *old_down, *up}:
        if m in up or not old_up:
            # A down file without an up file: the up projection ran the engine's default.
            if m in up:
                merged_up[m], merged_down[m] = up[m], down[m]
            continue
        merged_up[m] = dict(old_up[nearest_key(list(old_up), m)])
        before = old_down[nearest_key(list(old_down), m)] if old_down else merged_up[m]
        merged_down[m] = {**before, "BLOCK_SIZE_M": merged_up[m]["BLOCK_SIZE_M"]}
    return merged_up, merged_down


def _checked(spec: EngineSpec, shape: MoEShape, table: ConfigTable) -> tuple[Entries, Entries]:
    if not table:
        raise ExportError("there are no tuned batch sizes to write: tune first, or give another storage or shape")
    for m, pair in table.items():
        if isinstance(m, bool) or not isinstance(m, int) or m < 1:
            raise ExportError(f"batch size {m!r} cannot be written: give whole numbers of at least 1")
        for config in (pair.up, pair.down):
            if shape.block_shape and config.block_size_k > shape.block_shape[1]:
                what = "is another config" if spec.clamps_block_k else "gives wrong numbers"
                raise ExportError(
                    f"batch size {m}: BLOCK_SIZE_K {config.block_size_k} is over block_k {shape.block_shape[1]}, "
                    f"which {what} in {spec.title}: tune it again"
                )
            for key in config.to_dict():
                if key not in spec.keys:
                    raise ExportError(f"batch size {m}: {spec.title} knows no {key}: tune without it for {spec.title}")
        if not spec.split and pair.up != pair.down:
            raise ExportError(
                f"batch size {m} has two configs ({pair.up} and {pair.down}), and {spec.title} reads one for both "
                f"roles: tune with mode 'joint' for {spec.title}"
            )
        if pair.up.block_size_m != pair.down.block_size_m:
            raise ExportError(
                f"batch size {m}: BLOCK_SIZE_M is {pair.up.block_size_m} for up and {pair.down.block_size_m} for down, "
                "and one alignment serves both: give both the same"
            )
    more = spec.added_keys(shape)
    up, down = ({m: {**pair.config(role).to_dict(), **more} for m, pair in table.items()} for role in ROLES)
    return up, down


def _existing(path: Path, engine: str, triton_version: str) -> tuple[Entries, dict[str, Any]]:
    if not path.exists():
        return {}, {}
    file = read_config_file(path, engine=engine)
    broken = next((p for p in file.problems if p.severity == "error"), None)
    if broken is not None:
        raise ExportError(f"{path} is there and broken ({broken.message}): mend or move it, or replace it as a whole")
    keep = {"triton_version": triton_version} if file.triton_version == triton_version else {}
    return {m: dict(entry) for m, entry in file.entries.items()}, keep


def _text(entries: Entries, extra: Mapping[str, Any] | None = None) -> str:
    ordered = {**(extra or {}), **{str(m): entries[m] for m in sorted(entries)}}
    return json.dumps(ordered, indent=4) + "\n"
