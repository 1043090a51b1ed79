"""Operands, references, checks and rounds, with Triton's interpreter in the place of a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moeopt.core.config import LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell, Job
from moeopt.errors import InvalidInputError
from moeopt.kernels.align import kept_with
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.kernels.workset import LAUNCHES
from moeopt.measure.bench import BenchError
from tests.measure.measure_cpu import CpuBench, QuickKernel

SHAPE = MoEShape(8, 2, 64, 32)
CONFIG = LaunchConfig(16, 32, 32, 1, 4, 2)


def make(**options) -> CpuBench:
    values = {"kernel": BuiltinKernel, "shape": SHAPE, "routing": "uniform", "batch_sizes": (4,), **options}
    bench = CpuBench(values.pop("kernel"), values.pop("shape"), 0, **values)
    bench.open()
    return bench


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        MoEShape(8, 2, 64, 32, "fp8_w8a8", block_shape=(32, 32)),
        MoEShape(4, 2, 64, 32, ep_size=2),
    ],
    ids=lambda shape: shape.slug(),
)
def test_the_kernels_result_agrees_with_the_reference_in_both_roles(shape: MoEShape) -> None:
    bench = make(shape=shape, batch_sizes=(2,))
    checked = bench.check(Job(Cell("joint", 2), CONFIG))
    assert 0 < checked.relative_error < 1e-2
    assert len(bench._sides) == 2


def test_what_a_launch_does_not_write_is_found_by_the_poison() -> None:
    class Lazy(BuiltinKernel):
        def bind(self, layer, role, batch, config, out):
            return lambda: None

    bench = CpuBench(Lazy, SHAPE, 0, "uniform", (4,))
    bench.open()
    assert not bench.check(Job(Cell("up", 4), CONFIG)).relative_error <= 1e-2


def test_a_result_that_is_wrong_in_one_row_is_found() -> None:
    class Wrong(QuickKernel):
        def bind(self, layer, role, batch, config, out):
            launch = super().bind(layer, role, batch, config, out)

            def wrong() -> None:
                launch()
                out[3] *= 1.5

            return wrong

    bench = CpuBench(Wrong, SHAPE, 0, "uniform", (64,))
    bench.open()
    assert bench.check(Job(Cell("down", 64), CONFIG)).relative_error > 1e-2


def test_a_graph_holds_launches_over_different_routings_and_is_warmed_up_once() -> None:
    bench = make(kernel=QuickKernel)
    assert bench.check(Job(Cell("up", 4), CONFIG)).relative_error < 3e-3
    assert bench.round() > 0
    timer = bench._timers[0]
    assert len(timer.captured) >= LAUNCHES and timer.replays == 2
    bench.round()
    assert timer.replays == 3
    bench.finish()
    assert timer.captured == [] and bench._sides == []
    workload = bench._workloads["up", 4]
    assert len({tuple(b.topk_ids.flatten().tolist()) for b in workload.batches}) > 1
    assert workload.workset.cold and len(workload.workset.topk_ids) == len(workload.batches)


def test_a_warm_cache_repeats_one_batch() -> None:
    bench = make(warm_l2=True)
    bench.prepare(Cell("up", 4))
    batches = bench._workloads["up", 4].batches
    assert len(batches) == LAUNCHES and all(batch is batches[0] for batch in batches)


def test_operands_are_made_once_and_references_are_dropped_where_memory_is_short() -> None:
    bench = make(batch_sizes=(2, 4))
    bench.prepare(Cell("joint", 4))
    first = bench._workloads["up", 4]
    bench.prepare(Cell("up", 4))
    assert bench._workloads["up", 4] is first and len(bench._references) == 2
    bench._reference_room = bench._references["up", 4].nbytes
    bench.prepare(Cell("up", 2))
    assert list(bench._references) == [("up", 2)]


def test_too_little_memory_is_a_refusal_with_numbers() -> None:
    with pytest.raises(BenchError, match=r"NVIDIA H200 has 0\.1 GiB of memory free and \d+\.\d GiB are needed"):
        make(free=100 << 20)


def test_reasons_of_failures() -> None:
    def failing(error: Exception):
        class Failing(BuiltinKernel):
            def bind(self, layer, role, batch, config, out):
                raise error

        bench = CpuBench(Failing, SHAPE, 0, "uniform", (4,))
        bench.open()
        return bench

    class OutOfResources(Exception):  # noqa: N818 (Triton's name)
        pass

    job = Job(Cell("up", 4), CONFIG)
    for error, reason in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"), "runtime"),
        (InvalidInputError("no"), "constraints"),
        (OutOfResources("out of resource: shared memory"), "constraints"),
    ):
        with pytest.raises(BenchError) as found:
            failing(error).check(job)
        assert found.value.reason == reason and "\n" not in str(found.value)
    with pytest.raises(RuntimeError, match="CUDA error"):
        failing(RuntimeError("CUDA error: unspecified launch failure")).check(job)


def test_what_was_made_for_a_tensor_is_kept_while_it_lives() -> None:
    made: list[int] = []

    def value(number: int) -> int:
        made.append(number)
        return number

    ids = torch.zeros((2, 2), dtype=torch.int32)
    same = torch.zeros((2, 2), dtype=torch.int32)
    assert [kept_with(ids, "a", lambda: value(1)) for _ in range(3)] == [1, 1, 1]
    assert kept_with(ids, "b", lambda: value(2)) == 2
    assert kept_with(same, "a", lambda: value(3)) == 3
    assert made == [1, 2, 3]


def test_a_bench_can_be_sent_to_its_process() -> None:
    import pickle

    bench = CpuBench(BuiltinKernel, SHAPE, 0, "uniform", (4,))
    assert dataclasses.asdict(pickle.loads(pickle.dumps(bench))) == dataclasses.asdict(bench)
