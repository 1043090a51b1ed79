from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import create_trial

from moeopt import LaunchConfig, MoEShape, SearchSpace
from moeopt.core.config import CONFIG_KEYS, REQUIRED_KEYS
from moeopt.errors import InvalidInputError, MoeoptError

BF16 = MoEShape(256, 8, 3072, 256)
BLOCK_FP8 = MoEShape(256, 8, 6144, 256, "fp8_w8a8", block_shape=(128, 128))
CONFIG = LaunchConfig(16, 64, 128, 1, 4, 3)

configs = st.builds(
    LaunchConfig,
    *[st.sampled_from([1, 2, 16, 32, 64, 128, 256, 1024])] * 4,
    *[st.integers(1, 32)] * 2,
    maxnreg=st.sampled_from([0, 96, 128, 255]),
    use_tma=st.booleans(),
)


@given(configs)
def test_config_round_trip_through_json(config: LaunchConfig) -> None:
    entry = json.loads(json.dumps(config.to_dict()))
    assert LaunchConfig.from_dict(entry) == config
    assert tuple(entry)[:6] == REQUIRED_KEYS
    assert ("maxnreg" in entry, "USE_TMA" in entry) == (bool(config.maxnreg), config.use_tma)


def test_split_k_of_one_is_dropped_and_another_is_unknown() -> None:
    entry = CONFIG.to_dict()
    assert LaunchConfig.from_dict({**entry, "SPLIT_K": 1}) == CONFIG
    with pytest.raises(InvalidInputError, match="'SPLIT_K' is unknown"):
        LaunchConfig.from_dict({**entry, "SPLIT_K": 2})


@pytest.mark.parametrize("key", REQUIRED_KEYS)
def test_config_keys_and_values(key: str) -> None:
    entry = CONFIG.to_dict()
    with pytest.raises(InvalidInputError, match=f"{key!r} is missing"):
        LaunchConfig.from_dict({k: v for k, v in entry.items() if k != key})
    for bad in (0, -1, 1.5, "64", None, True, [64]):
        with pytest.raises(InvalidInputError, match=f"launch config {key} is"):
            LaunchConfig.from_dict({**entry, key: bad})


def test_other_config_errors() -> None:
    entry = CONFIG.to_dict()
    with pytest.raises(InvalidInputError, match=r"'waves_per_eu' is unknown: the keys are BLOCK_SIZE_M, .*USE_TMA"):
        LaunchConfig.from_dict({**entry, "waves_per_eu": 0})
    with pytest.raises(InvalidInputError, match="USE_TMA is 1: give true or false"):
        LaunchConfig.from_dict({**entry, "USE_TMA": 1})
    assert LaunchConfig.from_dict({**entry, "maxnreg": 0, "USE_TMA": False}) == CONFIG
    for bad in (None, [], "x", 3):
        with pytest.raises(InvalidInputError, match="a mapping of its keys is expected"):
            LaunchConfig.from_dict(bad)  # type: ignore[arg-type]  # what a file may hold


@given(
    st.dictionaries(
        st.sampled_from([*CONFIG_KEYS, "SPLIT_K", "other"]), st.none() | st.integers() | st.text() | st.floats()
    )
)
def test_from_dict_of_anything(changes: dict[str, Any]) -> None:
    try:
        config = LaunchConfig.from_dict({**CONFIG.to_dict(), **changes})
    except MoeoptError as error:
        assert "\n" not in str(error).replace(repr(changes), "")
    else:
        assert LaunchConfig.from_dict(config.to_dict()) == config


def test_text_of_a_config_is_short_and_unique() -> None:
    assert str(CONFIG) == "16x64x128 G1 w4 s3"
    assert str(LaunchConfig(16, 64, 128, 1, 4, 3, maxnreg=96, use_tma=True)) == "16x64x128 G1 w4 s3 r96 tma"
    wide = SearchSpace.wide(BF16, extras=("maxnreg", "USE_TMA")).configs()
    assert len({str(c) for c in wide}) == len(wide)


def test_grid_is_what_the_published_scripts_walk() -> None:
    grid = SearchSpace.grid(BF16)
    assert len(grid) == len(grid.configs()) == len(set(grid.configs())) == 1920
    assert len(SearchSpace.grid(BLOCK_FP8)) == 1280
    assert {c.block_size_k for c in SearchSpace.grid(BLOCK_FP8).configs()} == {64, 128}


def test_wide_holds_the_grid_and_only_the_keys_that_the_kernel_can_use() -> None:
    for shape in (BF16, BLOCK_FP8):
        wide = SearchSpace.wide(shape)
        assert all(wide.contains(c) for c in SearchSpace.grid(shape).configs())
    assert set(SearchSpace.wide(BF16).values) == {*REQUIRED_KEYS, "maxnreg"}
    assert set(SearchSpace.wide(BF16, extras=()).values) == set(REQUIRED_KEYS)
    assert set(SearchSpace.wide(BF16, extras=("USE_TMA",)).values) == {*REQUIRED_KEYS, "USE_TMA"}


def test_contains() -> None:
    grid = SearchSpace.grid(BF16)
    assert grid.contains(CONFIG)
    assert not grid.contains(LaunchConfig(16, 64, 128, 2, 4, 3))
    assert not grid.contains(LaunchConfig(16, 64, 128, 1, 4, 3, maxnreg=96))
    assert not grid.contains(LaunchConfig(16, 64, 128, 1, 4, 3, use_tma=True))
    assert SearchSpace.wide(BF16).contains(LaunchConfig(16, 64, 128, 1, 4, 3, maxnreg=96))


@pytest.mark.parametrize("name", ["grid", "wide"])
def test_named(name: str) -> None:
    assert SearchSpace.named(name, BF16).name == name
    with pytest.raises(InvalidInputError, match="give 'grid' or 'wide'"):
        SearchSpace.named("huge", BF16)


@pytest.mark.parametrize("space", [SearchSpace.grid(BLOCK_FP8), SearchSpace.wide(BF16, extras=("maxnreg", "USE_TMA"))])
def test_optuna_parameters_and_back(space: SearchSpace) -> None:
    distributions = space.distributions()
    assert list(distributions) == list(space.values)
    for config in space.configs()[:: max(1, len(space) // 200)]:
        params = space.params(config)
        assert space.config(params) == config
        assert space.contains(config)
        create_trial(params=params, distributions=distributions, value=1.0)


def test_block_k_that_no_tile_divides() -> None:
    with pytest.raises(InvalidInputError, match="leaves no BLOCK_SIZE_K: block_k must be a multiple of 64"):
        SearchSpace.grid(BLOCK_FP8.replace(block_shape=(128, 48)))
    narrow = SearchSpace.wide(BLOCK_FP8.replace(block_shape=(128, 96)))
    assert narrow.values["BLOCK_SIZE_K"] == (32,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"BLOCK_SIZE_M": ()}, "has no values for BLOCK_SIZE_M"),
        ({"BLOCK_SIZE_M": (16, 16)}, "repeat"),
        ({"BLOCK_SIZE_M": (16, "32")}, "'32' of BLOCK_SIZE_M"),
        ({"BLOCK_SIZE_M": (True,)}, "True of BLOCK_SIZE_M"),
        ({"num_warps": (0,)}, "0 of num_warps"),
        ({"USE_TMA": (1,)}, "1 of USE_TMA"),
        ({"waves_per_eu": (1,)}, "'waves_per_eu' is unknown"),
    ],
)
def test_bad_spaces(change: dict[str, tuple[Any, ...]], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        SearchSpace("mine", {**SearchSpace.grid(BF16).values, **change})


def test_missing_key() -> None:
    values = dict(SearchSpace.grid(BF16).values)
    del values["num_stages"]
    with pytest.raises(InvalidInputError, match="'mine' has no values for num_stages"):
        SearchSpace("mine", values)


def test_a_field_name_is_no_key() -> None:
    """``use_tma`` is USE_TMA's field: neither is passed over, whichever space."""
    said = "search space key 'use_tma' is unknown: give USE_TMA"
    for name in ("grid", "wide"):
        with pytest.raises(InvalidInputError, match=said):
            SearchSpace.named(name, BF16, extras=("use_tma",))
    with pytest.raises(InvalidInputError, match=said):
        SearchSpace("x", {**SearchSpace.grid(BF16).values, "use_tma": (True,)})
    with pytest.raises(InvalidInputError, match="launch config key 'use_tma' is unknown: give USE_TMA"):
        LaunchConfig.from_dict({**CONFIG.to_dict(), "use_tma": True})
