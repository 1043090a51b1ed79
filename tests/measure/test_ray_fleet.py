"""The Ray executor on a cluster of two nodes in this machine, with recordings as GPUs."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moeopt.errors import DeviceError
from moeopt.measure.base import Cell, Device, Job, Measurement, Race, never_stop
from moeopt.measure.ray_fleet import RayFleet
from moeopt.measure.recording import RecordedDevice, Recording
from moeopt.shape import ROLES
from moeopt.study import StudyStore
from moeopt.tuner import TuneOptions, Tuner

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Off, Ray's nodes listen on 127.0.0.1 instead of the machine's address.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
import ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


class SlowRecording(RecordedDevice):
    """Replays with a pause for each job."""

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            time.sleep(0.05)
            yield measurement


def _open(recording: Recording, kind: type[RecordedDevice] = RecordedDevice) -> Device:
    return kind(recording)


def _refuse() -> Device:
    raise DeviceError("no GPU here")


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    second = cluster.add_node(**{k: v for k, v in NODE.items() if k != "include_dashboard"})
    cluster.wait_for_nodes()
    here = str(Path(__file__).parent)
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    cluster.second = second
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def recording(tiny_recording: Callable[..., Path]) -> Recording:
    return Recording.load(tiny_recording())


def test_two_nodes_answer_like_one_device_and_one_may_die(cluster: Any, recording: Recording, tmp_path: Path) -> None:
    local = RecordedDevice(recording)
    options = TuneOptions(batch_sizes=(1, 16, 64), trials=10, seed=2)
    with StudyStore(tmp_path / "local.db") as store:
        expected = Tuner(local, store, options).run()

    with RayFleet(functools.partial(_open, recording), 2) as fleet:
        nodes = {fleet._ray.get(m.handle.call.remote(_node)) for m in fleet._members}
        assert len(nodes) == 2, "one actor on each node"
        assert (fleet.shape, fleet.gpu, fleet.batch_sizes) == (local.shape, local.gpu, local.batch_sizes)
        assert fleet.candidates(sorted(recording.rows)) == local.candidates(sorted(recording.rows))
        cell = Cell("up", 16)
        assert fleet.roofline_us(cell) == local.roofline_us(cell)
        assert fleet.default_config("up", 16) == local.default_config("up", 16)

        jobs = [Job(Cell(role, m), c) for c in sorted(recording.rows)[:40] for m in (1, 16, 64) for role in ROLES]

        def race(job: Job, rounds: Sequence[float]) -> bool:
            return rounds[-1] > 30

        def in_order(found: Iterator[Measurement]) -> list[Measurement]:
            return sorted(found, key=lambda m: m.job)

        assert in_order(fleet.measure(jobs, race)) == in_order(local.measure(jobs, race))
        begun = fleet.measure(jobs)
        next(begun)
        begun.close()
        assert in_order(fleet.measure(jobs[:6])) == in_order(local.measure(jobs[:6]))
        with StudyStore(tmp_path / "ray.db") as store:
            result = Tuner(fleet, store, options).run()
        assert result.rows == expected.rows

    with RayFleet(functools.partial(_open, recording, SlowRecording), 2) as fleet:
        timer = threading.Timer(1.0, lambda: cluster.remove_node(cluster.second, allow_graceful=False))
        timer.start()
        answered = Counter(measurement.job for measurement in fleet.measure(jobs))
        timer.join()
        assert answered == Counter(jobs), "each once, those of the dead node, too"
        assert len(fleet._members) == 1
        assert in_order(fleet.measure(jobs[:6])) == in_order(local.measure(jobs[:6]))


def _node(device: Device) -> str:
    return str(ray.get_runtime_context().get_node_id())


def test_no_gpu_in_the_cluster(cluster: Any) -> None:
    with pytest.raises(DeviceError, match="no GPU here"):
        RayFleet(_refuse, 1)
    from moeopt.devices import DeviceOptions, open_device

    with pytest.raises(DeviceError, match="the Ray cluster has no GPU"):
        open_device(None, None, DeviceOptions(executor="ray"))
