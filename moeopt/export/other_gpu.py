"""Configs that were tuned on one GPU, written under the name of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import illegal_reason
from moeopt.core.shape import ROLES, MoEShape
from moeopt.core.table import ConfigTable
from moeopt.errors import ExportError, UnknownGpuError
from moeopt.export.names import device_relatives, full_gpu_name, nearest_key

_OTHER_MAKERS: Final = ("AMD", "INTEL")


@dataclass(frozen=True)
class TableForGpu:
    """What can be written for a GPU.

    Attributes:
        gpu_name: As torch reports it.
        table: The configs that fit it.
        notes: What the user should know.
    """

    gpu_name: str
    table: ConfigTable
    notes: tuple[str, ...] = ()


def table_for_gpu(table: ConfigTable, shape: MoEShape, tuned_on: str, asked: str | None) -> TableForGpu:
    """The configs to write under the name of a GPU, without those that do not fit it.

    Args:
        table: The tuned configs.
        shape: The layer as one GPU sees it.
        tuned_on: The GPU, as torch reports it.
        asked: The GPU of the server, or None for the same.

    Raises:
        ExportError: It is of another maker, nothing says that there is a GPU of this name, or nothing fits it.
    """
    name = full_gpu_name(asked) if asked is not None else tuned_on
    device, there = name.replace(" ", "_"), tuned_on.replace(" ", "_")
    if device == there or device in device_relatives(there):
        return TableForGpu(name, table)
    if device.upper().startswith(_OTHER_MAKERS):
        raise ExportError(f"--gpu-name {name!r}: configs tuned on {tuned_on} are of no use there: tune on that GPU")
    notes = [
        f"these configs were tuned on {tuned_on}, not on {name}: check them there with moeopt verify, or tune there"
    ]
    try:
        gpu = GpuSpec.by_name(name)
    except UnknownGpuError:
        if not device.upper().startswith("NVIDIA_"):
            raise ExportError(
                f"--gpu-name {asked!r} is no GPU that is known: give its name as torch and nvidia-smi -L report it, "
                "such as 'NVIDIA GeForce RTX 5090'"
            ) from None
        notes.append(f"{name} is not in the table of GPUs: whether the configs fit it was not checked")
        return TableForGpu(name, table, tuple(notes))
    bad = {
        m: next(filter(None, (illegal_reason(pair.config(role), shape, role, gpu) for role in ROLES)), None)
        for m, pair in table.items()
    }
    fits = table.take(m for m in table if bad[m] is None)
    if not fits:
        reason = next(filter(None, bad.values()))
        raise ExportError(f"none of the configs fits {name} ({reason}): tune on that GPU")
    for m in table:
        if bad[m] is not None:
            stands_in = nearest_key(list(fits), m)
            notes.append(f"left out batch size {m} (its config {bad[m]}): the config of {stands_in} runs there")
    return TableForGpu(name, fits, tuple(notes))
