"""On a real GPU: what the CPU tests cannot show."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton

from benchmarks import agreement
from moeopt.compile import CompilePool
from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell, Job
from moeopt.kernels import get_kernel
from moeopt.measure.base import Device
from moeopt.measure.cuda import CudaDevice, open_cuda
from moeopt.measure.cuda_bench import CudaBench
from moeopt.measure.options import DeviceOptions
from moeopt.measure.rates import RateStore
from moeopt.measure.supervisor import Deadlines
from moeopt.testing.suites import DeviceTestCase
from tests.measure import measure_gpu_faults

pytestmark = pytest.mark.gpu

BF16 = MoEShape(64, 8, 2048, 256)
FP8 = MoEShape(64, 8, 2048, 256, "fp8_w8a8", (128, 128))
SIZES = (1, 64, 1024)
CONFIGS = (
    LaunchConfig(16, 64, 64, 1, 4, 3),
    LaunchConfig(16, 128, 128, 16, 4, 2),
    LaunchConfig(32, 64, 128, 1, 4, 3),
    LaunchConfig(64, 128, 64, 16, 8, 3),
)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaDevice]:
    with open_one(tmp_path_factory.mktemp("cuda")) as device:
        yield device


def open_one(folder: Path) -> CudaDevice:
    options = DeviceOptions(kernel="builtin", compile_cache=folder / "cache")
    return CudaDevice(BF16, 0, options, batch_sizes=SIZES, rates=RateStore(folder / "rates.json"))


def open_all(folder: Path) -> Device:
    return open_cuda(BF16, None, DeviceOptions(kernel="builtin", compile_cache=folder / "cache"), batch_sizes=SIZES)


OPEN = [
    pytest.param(open_one, id="one"),
    pytest.param(open_all, id="all", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]


@pytest.fixture(scope="module", params=OPEN)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Device]:
    """Opens one GPU or all, with one cache for all tests."""
    return functools.partial(request.param, tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def opened(make: Callable[[], Device]) -> Iterator[Device]:
    with make() as device:
        yield device


class TestCudaDevice(DeviceTestCase):
    repeatable = 0.1

    @pytest.fixture
    def make_device(self, make: Callable[[], Device]) -> Callable[[], Device]:
        return make

    @pytest.fixture
    def device(self, opened: Device) -> Device:
        return opened

    @pytest.fixture
    def batch_sizes(self) -> tuple[int, ...]:
        return SIZES

    @pytest.fixture
    def configs(self) -> tuple[LaunchConfig, ...]:
        return CONFIGS


def jobs(*roles: str) -> list[Job]:
    return [Job(Cell(role, m), config) for m in SIZES for role in roles for config in CONFIGS]  # type: ignore[arg-type]


def test_every_config_is_right_and_timed_and_the_worker_compiles_nothing(device: CudaDevice) -> None:
    found = list(device.measure(jobs("up", "down")))
    assert {m.job for m in found} == set(jobs("up", "down"))
    assert [m.failure for m in found if m.status != "ok"] == []
    for m in found:
        assert m.relative_error is not None and 0 < m.relative_error < 1e-2
        assert len(m.us) >= 3 and min(m.us) > 0
        spread = statistics.stdev(m.us) / m.median_us
        assert spread < 0.1, (m.job, m.us)
        roofline = device.spec.roofline_us(m.job.cell)
        assert roofline is not None and m.median_us > 0.8 * roofline, (m.job, m.us, roofline)
    stats = device.statistics()
    assert stats.compiled_in_worker == 0
    assert stats.loaded_in_worker > 0
    assert stats.worker_starts == 1 and not stats.restarts


def test_a_joint_cell_is_about_the_sum_of_its_roles(device: CudaDevice) -> None:
    config = CONFIGS[1]
    cells = [Cell(role, 1024) for role in ("up", "down", "joint")]
    found = {m.job.cell.role: m.median_us for m in device.measure([Job(cell, config) for cell in cells])}
    assert found["joint"] == pytest.approx(found["up"] + found["down"], rel=0.05)


def test_times_are_repeatable(device: CudaDevice) -> None:
    job = Job(Cell("up", 1024), CONFIGS[3])
    first, second = (next(iter(device.measure([job]))).median_us for _ in range(2))
    assert first == pytest.approx(second, rel=0.05)


def test_graphs_are_cold_and_events_lie_inside_them(device: CudaDevice) -> None:
    list(device.measure(jobs("up", "down")))
    worksets = device._ask(measure_gpu_faults.worksets)
    assert worksets["down", 1].cold and worksets["up", 1024].cold
    assert len(worksets["down", 1].topk_ids) > len(worksets["up", 1024].topk_ids)
    assert device.worker_facts.timing.startswith("events")


def test_rates_are_those_of_a_gpu_and_are_kept(device: CudaDevice, tmp_path: Path) -> None:
    rates = device.rates()
    assert 100 < rates.copy_gbps <= rates.memory_gbps < 20_000
    assert rates.matmul_tflops is not None and 10 < rates.matmul_tflops < 10_000
    assert device._rate_store.path.exists()


@pytest.mark.parametrize("shape", [FP8, MoEShape(64, 8, 2048, 256, "int8_w8a8", per_channel=True)], ids=MoEShape.slug)
def test_other_dtypes_are_right(shape: MoEShape, tmp_path: Path) -> None:
    options = DeviceOptions(kernel="builtin", compile_cache=tmp_path / "cache")
    with open_cuda(shape, [0], options, batch_sizes=(64,)) as device:
        candidates = device.spec.candidates(CONFIGS)
        found = list(device.measure([Job(Cell(r, 64), c) for r in ("up", "down") for c in candidates]))
        assert [m.failure for m in found if m.status == "failed"] == []
        assert device.statistics().compiled_in_worker == 0  # type: ignore[attr-defined]


@contextlib.contextmanager
def faulty_device(folder: Path, faulty: dict[LaunchConfig, measure_gpu_faults.Kind]) -> Iterator[CudaDevice]:
    """A device whose kernel misbehaves on some configs; deadlines are short."""
    options = DeviceOptions(kernel="builtin", compile_cache=folder / "cache")
    deadlines = Deadlines(first_check=5.0, floor=3.0)
    with CudaDevice(BF16, 0, options, batch_sizes=(64,), deadlines=deadlines) as device:
        device._supervisor.bench.make_kernel = functools.partial(  # type: ignore[attr-defined]
            measure_gpu_faults.FaultingKernel, faulty
        )
        device._supervisor._drop()
        yield device


@pytest.mark.parametrize(
    ("kind", "reason", "restarts"),
    [
        ("fault", "runtime", {"sticky": 1}),
        ("hang", "timeout", {"hang": 1}),
        ("memory", "runtime", {}),
        ("wrong", "correctness", {}),
        ("crash", "runtime", {"crash": 1}),
    ],
)
def test_a_launch_that_misbehaves_costs_its_config_alone(
    kind: measure_gpu_faults.Kind, reason: str, restarts: dict[str, int], tmp_path: Path
) -> None:
    """A real illegal address that sticks, a real endless kernel, real memory that is not there."""
    with faulty_device(tmp_path, {CONFIGS[1]: kind}) as device:
        found = {m.job.config: m for m in device.measure([Job(Cell("up", 64), c) for c in CONFIGS])}
        failure = found[CONFIGS[1]].failure
        assert failure is not None and failure.reason == reason, failure
        assert "\n" not in failure.message and len(failure.message) < 500
        assert [found[c].failure for c in CONFIGS if c != CONFIGS[1]] == [None] * 3
        assert device.statistics().restarts == restarts


def test_the_worker_and_do_bench_time_the_same_launches_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far they are apart is for benchmarks/agreement.py to say, which has the GPU for itself."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = torch.cuda.current_stream()
    bench = CudaBench(functools.partial(get_kernel, "builtin"), MoEShape(128, 8, 4096, 512), 0, "uniform", (1024,))
    try:
        bench.open()
        found = agreement.compare(bench, "bf16", "up", 1024, CONFIGS[3], pairs=10)
    finally:
        torch.cuda.set_stream(before)
        triton.knobs.compilation.listener = None
    assert len(found.pairs) >= 10 and min(found.us) > 0


def test_a_binary_of_the_pool_is_the_one_that_is_launched(device: CudaDevice) -> None:
    assert isinstance(device.pool, CompilePool)
    before = device.statistics()
    config = LaunchConfig(32, 128, 64, 16, 4, 4)
    compiled = device.pool.submit(config, "up", 64).result()
    assert compiled.resources is not None and compiled.resources.compile_s > 0
    (found,) = device.measure([Job(Cell("up", 64), config)])
    after = device.statistics()
    assert found.resources["up"].registers == compiled.resources.registers
    assert after.compiled_in_worker == before.compiled_in_worker == 0
    assert after.loaded_in_worker > before.loaded_in_worker
