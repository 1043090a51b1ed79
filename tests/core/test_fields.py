"""Fields that are checked against their types, and the line that says what does not fit."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from msgspec import Meta

from moeopt.core.fields import Count, Rate, check_fields, check_keys, field_types, from_mapping
from moeopt.errors import InvalidInputError

if TYPE_CHECKING:
    from somewhere import Unseen  # type: ignore[import-not-found]  # only a type checker looks for it


@dataclass(frozen=True)
class Value:
    count: Count
    mode: Literal["split", "joint"] = "split"
    pair: Annotated[tuple[Count, Count], Meta(description="two sizes")] | None = None
    rate: Rate = 0.0
    wait: float | str = 0.0
    switch: bool = False
    other: Unseen = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_what_fits_is_taken_and_lists_become_tuples() -> None:
    value = Value(3, "joint", [1, 2], 5, "5m", True, other=object())  # type: ignore[arg-type]  # a list, as JSON has it
    assert (value.pair, value.rate, value.wait) == ((1, 2), 5.0, "5m")
    assert hash(replace(value, other=None)) == hash(replace(value, other=None))
    assert pickle.loads(pickle.dumps(replace(value, other=None))) == replace(value, other=None)
    assert "other" not in field_types(Value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"count": 0}, "count is 0: give a whole number of at least 1"),
        ({"count": True}, "count is True: give a whole number of at least 1"),
        ({"count": "3"}, "count is '3': give a whole number of at least 1"),
        ({"mode": "both"}, "mode 'both' is unknown: give 'split' or 'joint'"),
        ({"mode": 3}, "mode 3 is unknown: give 'split' or 'joint'"),
        ({"pair": (1, 2, 3)}, "pair is (1, 2, 3): give two sizes"),
        ({"rate": float("nan")}, "rate is nan: give a number of at least 0"),
        ({"rate": float("inf")}, "rate is inf: give a number of at least 0"),
        ({"wait": None}, "wait is None: give a number or a text"),
        ({"switch": 1}, "switch is 1: give true or false"),
    ],
)
def test_what_does_not_fit_is_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        replace(Value(3), **changes)
    assert str(error.value) == said


def test_keys_of_a_mapping() -> None:
    assert from_mapping(Value, {"count": 3}, "value") == Value(3)
    for data, said in (
        (3, "value is 3: a mapping of its fields is expected"),
        ({"count": 3, "counts": 4}, "value key 'counts' is unknown: the keys are count, mode,"),
        ({}, "value key 'count' is missing"),
        ({"count": -1}, "count is -1: give"),
    ):
        with pytest.raises(InvalidInputError) as error:
            from_mapping(Value, data, "value")
        assert str(error.value).startswith(said)
    assert check_keys({"a": 1}, ("a", "b"), "table") == {"a": 1}
