"""Configs written under the name of another GPU than the one that they were tuned on."""

from __future__ import annotations

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.errors import ExportError
from moeopt.export.other_gpu import table_for_gpu

SHAPE = MoEShape(8, 2, 2048, 512)
SMALL, LARGE = LaunchConfig(16, 64, 64, 1, 4, 3), LaunchConfig(128, 256, 64, 1, 8, 4)
TABLE = ConfigTable.of({1: SMALL, 64: SMALL, 4096: LARGE})
H200 = "NVIDIA H200"


@pytest.mark.parametrize("asked", [None, "h200", "NVIDIA H200", "NVIDIA H200 NVL"])
def test_the_same_silicon_takes_everything(asked: str | None) -> None:
    found = table_for_gpu(TABLE, SHAPE, H200, asked)
    assert list(found.table) == [1, 64, 4096] and found.notes == ()


def test_what_does_not_fit_is_left_out_and_said() -> None:
    found = table_for_gpu(TABLE, SHAPE, H200, "rtx 5090")
    assert found.gpu_name == "NVIDIA GeForce RTX 5090" and list(found.table) == [1, 64]
    first, second = found.notes
    assert "tuned on NVIDIA H200, not on NVIDIA GeForce RTX 5090" in first
    assert "left out batch size 4096" in second and "101,376" in second and "the config of 64 runs there" in second


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(ExportError, match="none of the configs fits NVIDIA GeForce RTX 5090"):
        table_for_gpu(ConfigTable.of({1: LARGE}), SHAPE, H200, "NVIDIA GeForce RTX 5090")


@pytest.mark.parametrize(
    ("asked", "said"),
    [("MI300X", "AMD Instinct MI300X"), ("AMD Instinct MI325X", "of no use there"), ("rtx 9999", "nvidia-smi -L")],
)
def test_other_makers_and_names_of_nothing_are_refused(asked: str, said: str) -> None:
    with pytest.raises(ExportError) as error:
        table_for_gpu(TABLE, SHAPE, H200, asked)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_full_name_that_the_table_lacks_is_taken_with_a_note() -> None:
    found = table_for_gpu(TABLE, SHAPE, H200, "NVIDIA Quux 1")
    assert list(found.table) == [1, 64, 4096] and "was not checked" in found.notes[1]
