"""Tables of launch configs."""

from __future__ import annotations

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.table import ConfigPair, ConfigTable
from moeopt.errors import InvalidInputError

SMALL = LaunchConfig(16, 64, 128, 1, 4, 3)
LARGE = LaunchConfig(16, 128, 64, 8, 8, 3)


def test_one_config_serves_both_roles_in_joint_mode() -> None:
    joint, split = ConfigTable.of({64: SMALL, 1: LARGE}), ConfigTable.of({64: SMALL}, {64: LARGE})
    assert joint.joint and list(joint) == [64, 1] and joint[64] == ConfigPair(SMALL, SMALL)
    assert not split.joint and split[64].config("down") == LARGE and split[64].config("up") == SMALL
    assert split.joined() == ConfigTable.of({64: SMALL})
    assert split[64].to_dict() == {"up": SMALL.to_dict(), "down": LARGE.to_dict()}


def test_both_roles_have_the_same_batch_sizes() -> None:
    with pytest.raises(InvalidInputError, match="batch size 2 has a config for one role only"):
        ConfigTable.of({1: SMALL, 2: SMALL}, {1: LARGE})


def test_parts_and_additions() -> None:
    table = ConfigTable.of({1: SMALL, 64: LARGE})
    assert table.take([64]) == ConfigTable.of({64: LARGE}) and table.take(table) == table
    with pytest.raises(InvalidInputError, match="batch size 2 was not tuned: tuned are 1, 64"):
        table.take([1, 2])
    more = table.with_pairs({8: ConfigPair(LARGE, LARGE), 64: ConfigPair(SMALL, SMALL)})
    assert more == ConfigTable.of({1: SMALL, 8: LARGE, 64: SMALL})
    assert 8 in more and 8 not in table and len(more) == 3
