"""CudaDevice from end to end without a GPU: real compiles for sm_90, a real worker, launches that copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell, Job
from moeopt.errors import DeviceError
from moeopt.measure import cuda
from moeopt.measure.cuda import CudaDevice, open_cuda
from moeopt.measure.multi_gpu import MultiGpuDevice
from moeopt.measure.options import DeviceOptions
from moeopt.measure.rates import Rates, RateStore, rate_key
from moeopt.measure.supervisor import Deadlines
from moeopt.result import TuneResult
from moeopt.storage.store import StudyStore
from moeopt.testing.suites import DeviceTestCase
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner
from tests.measure import measure_cpu

SHAPE = MoEShape(8, 2, 64, 32)
PATIENT = Deadlines(first_check=120.0, floor=120.0)
ILLEGAL = LaunchConfig(256, 256, 256, 1, 4, 5)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> DeviceOptions:
    return DeviceOptions(kernel="builtin", workers=1, compile_cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> RateStore:
    from importlib.metadata import version

    store = RateStore(tmp_path_factory.mktemp("rates") / "rates.json")
    store.save(rate_key("NVIDIA H200", "", version("torch"), SHAPE), Rates(4000.0, 4200.0, 700.0))
    return store


@contextmanager
def on_the_cpu(logs: Path) -> Iterator[None]:
    """What is opened meanwhile has the CPU in the place of the GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "CudaBench", functools.partial(measure_cpu.CpuBench, quick=True))
        patch.setattr(cuda, "log_path", lambda index: logs / f"gpu{index}.log")
        yield


def open_one(options: DeviceOptions, rates: RateStore, logs: Path) -> CudaDevice:
    with on_the_cpu(logs):
        return CudaDevice(SHAPE, 0, options, batch_sizes=(1, 2), rates=rates, deadlines=PATIENT)


@pytest.fixture(scope="module")
def cpu(options: DeviceOptions, rates: RateStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaDevice]:
    with open_one(options, rates, tmp_path_factory.mktemp("logs")) as device:
        yield device


@pytest.mark.slow
class TestCudaDevice(DeviceTestCase):
    """Only the launches are made up: the host's clock repeats nothing."""

    @pytest.fixture
    def device(self, cpu: CudaDevice) -> CudaDevice:
        return cpu

    @pytest.fixture
    def make_device(self, options: DeviceOptions, rates: RateStore, tmp_path: Path) -> Callable[[], CudaDevice]:
        return functools.partial(open_one, options, rates, tmp_path)

    @pytest.fixture
    def batch_sizes(self) -> tuple[int, ...]:
        return (1, 2)

    @pytest.fixture
    def configs(self) -> list[LaunchConfig]:
        return [LaunchConfig(16, n, 32, 1, 4, 2) for n in (32, 64)]

    def test_a_tune_compiles_checks_times_and_exports(self, device: CudaDevice, tmp_path: Path) -> None:
        assert device.spec.gpu.name == "NVIDIA H200" and device.spec.provenance.kernel == "builtin"
        assert device.spec.candidates([ILLEGAL, LaunchConfig(16, 32, 64, 1, 4, 3)]) == [
            LaunchConfig(16, 32, 64, 1, 4, 3)
        ]
        before = device.statistics()
        with StudyStore(str(tmp_path / "s.db")) as store:
            result = TuneResult.of(Tuner(device, store, TuneOptions(batch_sizes=(1, 2), trials=2)).run())
        assert sorted(result.rows) == [1, 2]
        assert result.counts.failed == 0 and result.counts.measured >= 4
        assert result.rows[1].roofline_us is not None and result.rows[1].default_us is not None
        after = device.statistics()
        assert after.timed - before.timed >= result.counts.measured and after.worker_starts == before.worker_starts
        assert any(device.options.compile_cache.rglob("*.cubin"))
        paths = result.export("sglang", tmp_path / "files")
        assert all(path.exists() for path in paths)

    @pytest.mark.parametrize("busy", [None, "python (1) used the GPU (60 % of the time)"])
    def test_rates_of_a_disturbed_gpu_are_not_kept(
        self, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str | None
    ) -> None:
        store = RateStore(tmp_path / "empty.json")
        monkeypatch.setattr(device, "_rates", None)
        monkeypatch.setattr(device, "_rate_store", store)
        monkeypatch.setattr(device, "_ask", lambda _: Rates(1.0, 2.0, None))
        monkeypatch.setattr(device, "_poll", lambda **_: None)
        monkeypatch.setattr(device, "_busy", busy)
        assert device.rates() == Rates(1.0, 2.0, None)
        spec = device.spec
        kept = store.load(rate_key(spec.gpu.name, spec.provenance.driver, spec.provenance.torch, SHAPE))
        assert kept == (Rates(1.0, 2.0, None) if busy is None else None)


@pytest.mark.slow
def test_several_gpus_share_one_pool_and_are_one_device(options: DeviceOptions, tmp_path: Path) -> None:
    with on_the_cpu(tmp_path), open_cuda(SHAPE, [0, 1], options, batch_sizes=(1, 2)) as several:
        assert isinstance(several, MultiGpuDevice)
        first, second = several.devices
        assert first.pool is second.pool
        several.control = (1.0, 1.0)  # a loaded host's times do not agree
        jobs = [Job(Cell("up", m), LaunchConfig(16, 32, 32, 1, 4, 2)) for m in (1, 2)]
        found = list(several.measure(jobs))
        assert {m.job for m in found} == set(jobs) and {m.status for m in found} == {"ok"}
        assert [d.statistics().timed - d.statistics().timed_again for d in several.devices] == [1, 1]


def test_without_a_gpu_there_is_one_line_that_says_so(options: DeviceOptions) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="no CUDA GPU was found: use a GPU machine"):
        open_cuda(SHAPE, None, options)
    with pytest.raises(DeviceError, match="no CUDA GPU was found: use a GPU machine"):
        open_cuda(SHAPE, [0], options)
