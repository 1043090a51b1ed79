"""Requests of a tune, by the names that options have in a study file and on the command line."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

import moeopt
from moeopt.cli.tune import TuneArguments
from moeopt.errors import InvalidInputError
from moeopt.measure.options import DeviceOptions
from moeopt.tuning.options import OPTIONS, TuneOptions, TuneRequest


def test_options_find_the_part_that_they_are_of() -> None:
    first = TuneRequest(gpu="all", search=TuneOptions(trials=5, seed=7), device=DeviceOptions(routing="zipf:1.2"))
    given = {"batch_sizes": [8, 1], "gpu": "cuda:1", "trials": 9, "timeout": "5m", "wait_idle": "90s", "warm_l2": True}
    request = first.with_options(given)
    assert (request.batch_sizes, request.gpu, request.storage) == ((8, 1), "cuda:1", first.storage)
    assert request.search == TuneOptions(trials=9, seed=7, timeout=300.0)
    assert request.device == DeviceOptions(routing="zipf:1.2", wait_idle=90.0, warm_l2=True)
    assert first.with_options({}) == first


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trial": 3}, "option key 'trial' is unknown: the keys are batch_sizes, engine, executor,"),
        ({"gpu": 3}, "gpu is 3: give a text"),
        ({"trials": "3"}, "trials is '3': give a whole number of at least 1"),
        ({"kernel": "cutlass"}, "kernel 'cutlass' is unknown"),
        ({"wait_idle": -1}, "wait_idle is -1: give more than 0 seconds"),
        (["trials"], "option is ['trials']: a mapping of its fields is expected"),
    ],
)
def test_what_cannot_be_is_one_line(given: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        TuneRequest().with_options(given)
    assert str(error.value).startswith(said)


def test_every_option_can_be_said_everywhere() -> None:
    """In a study file, on the command line, where --export names the engine, and to the library."""
    assert {field.name for field in fields(TuneArguments)} == set(OPTIONS) - {"engine"}
    assert set(OPTIONS) <= set(inspect.signature(moeopt.tune).parameters)
