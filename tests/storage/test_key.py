"""Keys and study names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell
from moeopt.errors import StorageError
from moeopt.storage.key import StudyKey, cell_of, words
from moeopt.storage.store import StudyStore

FIELDS = (
    "shape", "gpu", "kernel", "kernel_version", "kernel_hash", "triton", "torch", "driver", "routing", "mode",
    "recorded", "format",
)  # fmt: skip


def test_the_name_says_what_it_is(key: StudyKey) -> None:
    name = key.study_name(Cell("up", 64))
    assert words(name) == "E256-top8-K3072-N256-bf16 | NVIDIA H200 | builtin | triton 3.6.0 | up | M=00064"
    assert name.endswith(key.digest)


def test_names_sort_by_batch_size_within_a_role(key: StudyKey) -> None:
    cells = [Cell(role, m) for role in ("down", "up") for m in (1, 8, 64, 512, 4096)]
    assert sorted(key.study_name(cell) for cell in cells) == [key.study_name(cell) for cell in cells]


def test_long_and_odd_words_fit_a_database(key: StudyKey) -> None:
    odd = replace(key, gpu="A | B" * 200, provenance=replace(key.provenance, routing="file:" + "x" * 300))
    name = odd.study_name(Cell("up", 1))
    assert len(name) <= 512
    assert name.endswith(f" | up | M=00001 | {odd.digest}")


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_makes_another_key_and_is_named(key: StudyKey, field: str) -> None:
    new = {"shape": MoEShape(256, 8, 6144, 256).to_dict(), "recorded": True, "format": 2}
    assert sorted(key.attrs()) == sorted(FIELDS)
    other = StudyKey.from_attrs({**key.attrs(), field: new.get(field, f"{key.attrs()[field]}x")})
    assert other is not None and other != key
    assert other.digest != key.digest
    assert other.study_name(Cell("up", 1)) != key.study_name(Cell("up", 1))
    assert other.difference(key).startswith(field.replace("_", " ") + " is ")
    assert key.difference(key) == ""
    assert StudyKey.from_attrs(other.attrs()) == other


def test_the_source_is_no_part_of_a_key(key: StudyKey) -> None:
    other = replace(key, provenance=replace(key.provenance, source="measured elsewhere"))
    assert other == key and hash(other) == hash(key) and other.digest == key.digest


def test_a_warm_l2_is_stored_with_the_routing(key: StudyKey) -> None:
    warm = replace(key, provenance=replace(key.provenance, routing="zipf:1.2", warm_l2=True))
    assert warm.attrs()["routing"] == "zipf:1.2, warm L2"
    assert warm.title().endswith(" | zipf:1.2, warm L2")
    assert StudyKey.from_attrs(warm.attrs()) == warm


def test_attributes_of_others_are_no_key() -> None:
    assert StudyKey.from_attrs({}) is None
    assert StudyKey.from_attrs({"shape": 3}) is None
    assert cell_of({"role": "sideways", "batch_size": 3}) is None
    assert cell_of({"role": "up", "batch_size": 3}) == Cell("up", 3)


def test_a_study_whose_key_was_changed_is_refused(tmp_path: Path, key: StudyKey) -> None:
    cell = Cell("up", 1)
    with StudyStore(tmp_path / "a.db") as store:
        store.load(key, [cell])
        store.optuna_study(key, cell).set_user_attr("triton", "3.7.0")
    with StudyStore(tmp_path / "a.db") as store, pytest.raises(StorageError, match=r"triton is 3\.6\.0, was 3\.7\.0"):
        store.load(key, [cell])


def test_studies_of_others_are_left_alone(tmp_path: Path, key: StudyKey) -> None:
    import optuna

    with StudyStore(tmp_path / "a.db") as store:
        optuna.create_study(study_name="mine", storage=store.backend.storage).add_trial(
            optuna.trial.create_trial(value=1.0)
        )
        assert store.keys() == []
        store.load(key, [Cell("up", 1)])
        (summary,) = store.keys()
        assert summary.trials == 0
