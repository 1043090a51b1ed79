"""The table of launch parameters, and what is derived from it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from optuna.distributions import IntDistribution

from moeopt.core.config import COLUMN, PARAMETERS, REQUIRED_KEYS, LaunchConfig, columns, config_table, configs_of
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.errors import InvalidInputError
from moeopt.search.features import config_features

SHAPE = MoEShape(256, 8, 3072, 256)
CONFIGS = SearchSpace.wide(SHAPE, extras=("maxnreg", "USE_TMA")).configs()[::997]


def test_configs_of_all_spaces_share_distributions() -> None:
    spaces = SearchSpace.grid(SHAPE), SearchSpace.wide(SHAPE)
    seen = {
        name: {repr(PARAMETERS[name].distribution(value)) for space in spaces for value in space.values.get(name, ())}
        for name in ("BLOCK_SIZE_M", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "maxnreg")
    }
    assert all(len(found) == 1 for found in seen.values()), seen
    assert all(
        repr(space.distributions()[key]) in found
        for space in spaces
        for key, found in seen.items()
        if key in space.values
    )
    # An engine's default beyond the bounds is stored all the same.
    assert PARAMETERS["BLOCK_SIZE_N"].distribution(1024)._contains(1024)


def test_the_forms_in_databases_are_those_of_the_first_release() -> None:
    """Optuna refuses a parameter whose distribution changed its kind, and an old database is to be resumed."""
    assert [PARAMETERS[key].distribution() for key in REQUIRED_KEYS] == [
        IntDistribution(8, 512, log=True),
        IntDistribution(8, 512, log=True),
        IntDistribution(16, 512, log=True),
        IntDistribution(1, 128, log=True),
        IntDistribution(1, 32, log=True),
        IntDistribution(1, 12),
    ]
    assert PARAMETERS["maxnreg"].distribution() == IntDistribution(0, 255)
    assert LaunchConfig(16, 32, 64, 1, 4, 3, 128, True).numbers() == [16, 32, 64, 1, 4, 3, 128, 1]


def test_every_form_leads_back_to_the_config() -> None:
    table = config_table(CONFIGS)
    assert configs_of(table) == CONFIGS
    assert columns(table, "maxnreg", "BLOCK_SIZE_M").tolist() == [
        [c.maxnreg for c in CONFIGS],
        [c.block_size_m for c in CONFIGS],
    ]
    for config in CONFIGS:
        assert LaunchConfig.from_dict(config.to_dict()) == config
        assert LaunchConfig.of_numbers(config.numbers()) == config
        assert LaunchConfig.of_numbers(config.numbers()[:6]) == LaunchConfig(*config.numbers()[:6])
    assert len({str(config) for config in CONFIGS}) == len(CONFIGS)


def test_features_are_steps_of_the_grid() -> None:
    features = config_features(config_table([LaunchConfig(16, 32, 64, 1, 4, 3), LaunchConfig(32, 32, 64, 4, 4, 3, 96)]))
    assert features.shape == (2, len(PARAMETERS) + 3)
    difference = features[1] - features[0]
    assert difference[COLUMN["BLOCK_SIZE_M"]] == 1.0, "a power of two"
    assert difference[COLUMN["GROUP_SIZE_M"]] == 1.0, "two powers of two"
    assert difference[-2] == pytest.approx(2 * np.log2(96 / 255)), "no limit counts as the most there is"
    assert difference[-1] == 0.0


@pytest.mark.parametrize(("key", "value"), [("num_warps", 0), ("num_warps", True), ("maxnreg", -1), ("USE_TMA", 1)])
def test_a_value_that_cannot_be_is_refused(key: str, value: object) -> None:
    entry = {**LaunchConfig(16, 32, 64, 1, 4, 3).to_dict(), key: value}
    with pytest.raises(InvalidInputError, match=f"launch config {key} is {value!r}: give "):
        LaunchConfig.from_dict(entry)


def test_a_key_that_no_parameter_has_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="'use_tma' is unknown"):
        SearchSpace.wide(SHAPE, extras=("use_tma",))


def test_a_new_parameter_is_one_row() -> None:
    """A field is added to LaunchConfig as one would write it there; every form then has it."""
    script = """
        import importlib.util, pathlib, sys
        spec = importlib.util.find_spec("moeopt.core.config")
        source = pathlib.Path(spec.origin).read_text()
        row = 'num_ctas: int = field(default=1, metadata=Parameter('
        row += '"num_ctas", (1, 2, 4), bounds=(1, 16), unset=1, label=" c").row())'
        assert source.count("    def values(self)") == 1
        source = source.replace("    def values(self)", "    " + row + "\\n\\n    def values(self)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        exec(compile(source, spec.origin, "exec"), module.__dict__)

        import datetime, math
        from moeopt import engines
        from moeopt.core.config import LaunchConfig, config_table, configs_of
        from moeopt.core.shape import MoEShape
        from moeopt.core.space import SearchSpace
        from moeopt.core.trial import Cell, Job, Measurement
        from moeopt.distributed.claims import config_of, config_text
        from moeopt.export.read import check_entry
        from moeopt.search.features import config_features
        from moeopt.search.surrogate import WITH_RECORDINGS
        from moeopt.storage.codec import PACKED, TrialContext, decode, encode

        shape = MoEShape(8, 2, 256, 128)
        space = SearchSpace.wide(shape, extras=("num_ctas",))
        config = next(c for c in space.configs() if c.num_ctas == 4)
        assert config.to_dict()["num_ctas"] == 4 and LaunchConfig.from_dict(config.to_dict()) == config
        assert str(config).endswith(" c4")
        assert space.config(space.params(config)) == config
        assert space.distributions()["num_ctas"].high == 16
        assert configs_of(config_table([config])) == (config,)
        plain = LaunchConfig.of_numbers(config.numbers()[:6])
        first, second = config_features(config_table([plain, config]))
        assert second[-1] - first[-1] == 2.0
        assert WITH_RECORDINGS.length_of(len(first)).shape == first.shape
        assert config_of(config_text(config)) == config and config_of("[16,32,64,1,4,3,0,0]").num_ctas == 1
        now = datetime.datetime(2026, 1, 1)
        row = encode(Measurement(Job(Cell("up", 1), config), "ok", (1.0,)), "r", 0, TrialContext(shape), now, now)
        assert row.params["num_ctas"] == 4
        assert decode(Cell("up", 1), row.user_attrs[PACKED]).measurement.job.config == config
        assert not list(check_entry(config.to_dict(), engines.get("sglang"), None, None, None))
        print("all forms")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.stdout.strip() == "all forms", run.stderr
