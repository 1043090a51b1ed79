"""What only Ray has: nodes, refusals, and binaries that travel. All else: test_executor.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

from moeopt.cli import build_app
from moeopt.compile import CompilePool
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.devices import open_device
from moeopt.distributed.ray_compile import CompileSetup, RayCompiler
from moeopt.distributed.ray_device import RayDevice
from moeopt.distributed.ray_open import start_broker
from moeopt.errors import DeviceError
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.testing.suites import DeviceTestCase
from tests.conftest import write_tiny_recording

from .executors import RayExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


def _open(recording: Recording) -> Device:
    return RecordedDevice(recording)


def _refuse() -> Device:
    raise DeviceError("no GPU here")


def _node(device: Device) -> str:
    return str(ray.get_runtime_context().get_node_id())


@pytest.fixture(scope="module")
def opened(started: RayExecutor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayDevice]:
    path = write_tiny_recording(tmp_path_factory.mktemp("ray") / "tiny.jsonl.gz")
    with RayDevice(functools.partial(_open, Recording.load(path)), 2) as device:
        yield device


class TestRayDevice(DeviceTestCase):
    repeatable = 0.0

    @pytest.fixture
    def device(self, opened: RayDevice) -> RayDevice:
        return opened

    @pytest.fixture
    def make_device(self, recording: Recording) -> Callable[[], RayDevice]:
        return lambda: RayDevice(functools.partial(_open, recording), 2)

    @pytest.fixture
    def truth(self, recording: Recording) -> RecordedDevice:
        return RecordedDevice(recording)


def test_an_actor_on_each_node(recording: Recording) -> None:
    with RayDevice(functools.partial(_open, recording), 2) as device:
        nodes = {ray.get(member.handle.call.remote(_node)) for member in device._members}
    assert nodes == {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_no_gpu_in_the_cluster() -> None:
    with pytest.raises(DeviceError, match="no GPU here"):
        RayDevice(_refuse, 1)
    with pytest.raises(DeviceError, match="the Ray cluster has no GPU"):
        open_device(None, MoEShape(8, 2, 64, 32), DeviceOptions(executor="ray"))


def test_binaries_are_compiled_on_the_nodes_and_come_here(
    cluster: RayExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "here"))
    shape, kernel = MoEShape(8, 2, 64, 32), BuiltinKernel()
    configs = [LaunchConfig(16, 32, 32, 1, 4, 2), LaunchConfig(16, 32, 32, 1, 8, 2)]
    broker = start_broker(reserved=0, workers=None)
    compiler = RayCompiler(broker, CompileSetup(kernel, shape, (9, 0)))
    futures = [compiler.submit(config, "up", 1) for config in configs]
    found = [future.result(timeout=120) for future in futures]
    assert compiler.submit(configs[0], "up", 1) is futures[0]
    assert [one.config for one in found] == configs
    assert all(one.failure is None and one.resources is not None and one.resources.registers > 0 for one in found)
    assert all(any(cache.rglob("*.cubin")) for cache in cluster.caches), "each node has compiled one"
    assert ray.get(broker.started.remote()) == 2
    compiler.close()
    # A process of this machine that asks Triton for them has nothing to compile.
    with CompilePool(kernel, shape, (9, 0), workers=1, cache_dir=tmp_path / "here") as pool:
        again = [pool.submit(config, "up", 1).result() for config in configs]
    assert [one.resources.compile_s for one in again if one.resources] == [0.0, 0.0]
    assert all(str(tmp_path / "here") in path for one in again for path in one.files.values())


def test_what_nobody_wants_any_more_is_not_compiled(tmp_path: Path) -> None:
    broker = start_broker(reserved=0, workers=1)
    compiler = RayCompiler(broker, CompileSetup(BuiltinKernel(), MoEShape(8, 2, 64, 32), (9, 0), tmp_path))
    first, *rest = [compiler.submit(LaunchConfig(16, 32, 32, group, 4, 3), "up", 1) for group in (1, 16, 32, 64)]
    urgent = compiler.submit(LaunchConfig(16, 32, 32, 1, 8, 3), "up", 1, priority=-1)
    for future in rest:
        assert future.cancel()
    assert first.result(timeout=120).failure is None
    assert urgent.result(timeout=120).failure is None
    assert ray.get(broker.started.remote()) == 2
    compiler.close()
    with pytest.raises(DeviceError, match="closed"):
        compiler.submit(LaunchConfig(16, 32, 32, 1, 4, 2), "up", 1)


def test_the_command(recording: Recording, tmp_path: Path) -> None:
    rows = []
    for executor in ("ray", "local"):
        args = ["tune", "--gpu", f"recorded:{recording.path}", "--trials", "4", "--batch-sizes", "1,16"]
        args += ["--storage", str(tmp_path / f"{executor}.db"), "--json", str(tmp_path / f"{executor}.json")]
        done = CliRunner().invoke(build_app(), [*args, "--executor", executor])
        assert done.exit_code == 0, done.output
        assert ("2 GPUs of a Ray cluster" in done.output) == (executor == "ray")
        rows.append(json.loads((tmp_path / f"{executor}.json").read_text())["batch_sizes"])
    assert rows[0] == rows[1]
