"""The rule of what is not launched, against everything that was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeopt.compile import SPILL_LIMIT_BYTES, rejection
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES
from moeopt.core.trial import Resources
from moeopt.recordings.format import Recording

H200 = GpuSpec.by_name("NVIDIA H200")
RECORDINGS = sorted((Path(__file__).parents[2] / "studies" / "recordings").glob("*.jsonl.gz"))


def test_within_the_limits_is_launched() -> None:
    assert rejection(Resources(255, SPILL_LIMIT_BYTES, H200.shared_memory_per_block_optin), H200) is None


@pytest.mark.parametrize(
    ("resources", "word"),
    [
        (Resources(255, SPILL_LIMIT_BYTES + 4, 1024), "local memory"),
        (Resources(64, 0, H200.shared_memory_per_block_optin + 1), "shared memory"),
    ],
)
def test_over_the_limits_is_not(resources: Resources, word: str) -> None:
    failure = rejection(resources, H200)
    assert failure is not None
    assert failure.reason == "constraints"
    assert word in failure.message


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda p: p.name.split(".")[0])
def test_no_rejected_config_was_near_the_best(path: Path) -> None:
    recording = Recording.load(path)
    ok = [row for row in recording.rows.values() if row.status == "ok"]
    rejected = 0
    for role in ROLES:
        resources = [row.resources(role) for row in ok]
        if "moeopt" not in recording.header.versions:
            resources = [_in_bytes(r) for r in resources]
        out = np.array([rejection(r, recording.gpu) is not None for r in resources])
        rejected = int(out.sum())
        for m in recording.batch_sizes:
            us = np.array([np.median(row.roles[role].us[m]) for row in ok])
            if out.any():
                assert us[out].min() > 1.05 * us.min(), (role, m)
    assert rejected < len(ok) / 2


def _in_bytes(resources: Resources) -> Resources:
    """Recordings made before moeopt hold Triton's own count: spilled registers, of 4 bytes each."""
    return Resources(resources.registers, 4 * resources.spills, resources.shared_bytes)
