"""A whole tune on a device on which a tenth of the configs is faulty in each of five ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import ROLES
from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.recordings.format import Recording
from moeopt.storage.store import StudyStore
from moeopt.testing.faults import REASONS, Fault, choose_faults
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner
from tests.measure.measure_workers import make_device

KINDS: tuple[Fault, ...] = ("crash", "hang", "wrong_result", "sticky_error", "memory")
SIZES = (64,)


@pytest.fixture
def recording(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


def best_split(recording: Recording, configs: Sequence[LaunchConfig], m: int) -> float:
    """Microseconds of the best pair with one BLOCK_SIZE_M."""
    best: dict[tuple[str, int], float] = {}
    for config in configs:
        for role in ROLES:
            us = sorted(recording.rows[config].roles[role].us[m])[0]
            best[role, config.block_size_m] = min(us, best.get((role, config.block_size_m), us))
    return min(best["up", block] + best["down", block] for block in {block for _, block in best})


@pytest.mark.slow
def test_the_best_sound_config_is_found_and_every_fault_is_counted(
    recording: Recording, tiny_recording: Callable[..., Path], tmp_path: Path
) -> None:
    # Every second one: each crash, hang and stuck GPU costs a new worker, a second or two.
    configs = [config for config, row in recording.rows.items() if row.status == "ok"][::2]
    faults = choose_faults(configs, share=0.1, kinds=KINDS, seed=0)
    assert Counter(faults.values()) == dict.fromkeys(KINDS, round(0.1 * len(configs)))
    device = make_device(tiny_recording(), tmp_path, faults=faults, batch_sizes=SIZES)
    asked: list[Job] = []
    measure = device.measure

    def listening(jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement, None, None]:
        asked.extend(jobs)
        yield from measure(jobs, race)

    device.measure = listening  # type: ignore[method-assign]
    device.spec = replace(device.spec, candidates=lambda wanted: [c for c in wanted if c in configs])
    with device, StudyStore(tmp_path / "study.db") as store:
        result = Tuner(device, store, TuneOptions(batch_sizes=SIZES, trials=len(configs), seed=0)).run()
        restarts = device.statistics().restarts
    faulty = [faults[job.config] for job in dict.fromkeys(asked) if job.config in faults]
    assert set(faulty) == set(KINDS), "the search met every kind"
    assert result.counts.reasons == Counter(REASONS[kind] for kind in faulty)
    assert result.counts.failed == len(faulty)
    assert {"sticky", "hang", "crash"} <= set(restarts)
    sound = [config for config in configs if config not in faults]
    for m in SIZES:
        row = result.best(m)
        assert {row.up.config, row.down.config} <= set(sound)
        assert row.total_us == pytest.approx(best_split(recording, sound, m), rel=0.01)
