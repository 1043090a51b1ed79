"""Facts of cells: as they are stored, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt.core.config import LaunchConfig
from moeopt.storage.facts import Baseline, CellFacts, Run

# The attributes of a joint cell's study, as every version has written them.
CONFIG: dict[str, Any] = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3,
}  # fmt: skip
STORED: dict[str, Any] = {
    "default_up": {"config": CONFIG, "us": 20.203},
    "default_down": {"config": CONFIG, "us": None},
    "winner_up": {"config": {**CONFIG, "maxnreg": 128, "USE_TMA": True}, "us": 10.229},
    "roofline_up": 6.107,
    "roofline_down": 3.065,
    "bytes_up": 25180160,
    "bytes_down": 12636160,
    "finals": [[CONFIG, [17.752, 17.75, 17.8]]],
    "run:1aaab865115d": {
        "portfolio": [CONFIG, {**CONFIG, "num_warps": 8}],
        "finished": True,
        "space": "grid",
        "params": ["BLOCK_SIZE_M", "num_warps"],
        "trials": 24,
        "seed": 0,
        "batch_sizes": [1, 64],
    },
}
UP = LaunchConfig(16, 32, 64, 1, 4, 3)


def test_what_is_stored_keeps_its_form() -> None:
    facts = CellFacts.decode({**STORED, "role": "joint", "batch_size": 1, "gpu": "NVIDIA H200"})
    assert facts.baselines["default", "up"] == Baseline(UP, 20.203)
    assert facts.baselines["default", "down"] == Baseline(UP, None)
    assert facts.baselines["winner", "up"].config == LaunchConfig(16, 32, 64, 1, 4, 3, 128, True)
    assert ("winner", "down") not in facts.baselines
    assert facts.roofline_us == {"up": 6.107, "down": 3.065}
    assert facts.launch_bytes == {"up": 25180160, "down": 12636160}
    assert facts.finals == {UP: (17.752, 17.75, 17.8)}
    assert facts.runs == {
        "1aaab865115d": Run(
            "1aaab865115d", (UP, LaunchConfig(16, 32, 64, 1, 8, 3)), True, "grid", ("BLOCK_SIZE_M", "num_warps"), 24, 0,
            (1, 64),
        )
    }  # fmt: skip
    assert facts.encode() == STORED
    assert json.dumps(facts.encode(), sort_keys=True) == json.dumps(STORED, sort_keys=True)
    assert list(facts.encode()["run:1aaab865115d"]) == list(STORED["run:1aaab865115d"]), "the order of keys, too"


def test_nothing_kept_and_empty_finals_are_different() -> None:
    assert CellFacts.decode({}) == CellFacts()
    assert CellFacts().encode() == {}
    assert CellFacts.decode({"finals": []}).finals == {}
    assert CellFacts(finals={}).encode() == {"finals": []}


def test_a_run_of_an_early_version_has_no_params() -> None:
    kept = {name: value for name, value in STORED["run:1aaab865115d"].items() if name not in ("params", "batch_sizes")}
    (run,) = CellFacts.decode({"run:x": kept}).runs.values()
    assert (run.tag, run.params, run.batch_sizes, run.trials) == ("x", (), (), 24)


@pytest.mark.parametrize(
    "attrs",
    [
        {"default_up": {"us": 1.0}},
        {"default_up": {"config": CONFIG, "us": "fast"}},
        {"default_up": 3},
        {"winner_down": {"config": {**CONFIG, "num_warps": "4"}, "us": 1.0}},
        {"roofline_up": None},
        {"bytes_up": 1.5},
        {"finals": [[CONFIG]]},
        {"finals": 7},
        {"run:a": []},
        {"run:a": {"portfolio": [{}]}},
        {"run:a": {"seed": "0"}},
    ],
)
def test_what_is_not_ours_is_refused(attrs: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        CellFacts.decode(attrs)


_configs = st.builds(
    LaunchConfig, *[st.sampled_from((16, 32, 64))] * 3, st.integers(1, 64), st.integers(1, 16), st.integers(1, 6),
    st.sampled_from((0, 96, 168)), st.booleans(),
)  # fmt: skip
_us = st.floats(0.1, 1e6, allow_nan=False)
_roles = st.sampled_from(("up", "down"))
_facts = st.builds(
    CellFacts,
    baselines=st.dictionaries(
        st.tuples(st.sampled_from(("default", "winner")), _roles), st.builds(Baseline, _configs, st.none() | _us)
    ),
    roofline_us=st.dictionaries(_roles, _us),
    launch_bytes=st.dictionaries(_roles, st.integers(1, 2**40)),
    finals=st.none() | st.dictionaries(_configs, st.tuples(_us, _us, _us), max_size=4),
    runs=st.dictionaries(
        st.just("tag"),
        st.builds(
            Run, st.just("tag"), st.lists(_configs, max_size=4).map(tuple), st.booleans(),
            st.sampled_from(("grid", "wide")), st.lists(st.text(max_size=8), max_size=3).map(tuple), st.integers(1, 99),
            st.none() | st.integers(0, 9), st.lists(st.integers(1, 4096), max_size=3).map(tuple),
        ),
    ),
)  # fmt: skip


@given(_facts)
def test_round_trip_through_json(facts: CellFacts) -> None:
    assert CellFacts.decode(json.loads(json.dumps(facts.encode()))) == facts
