"""PTX lines as Triton writes them."""

from __future__ import annotations

import pytest

from moeopt.compile import TensorCore, tensor_core

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1, %r2 }, ..."
FP8 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 { %r1 }, ..."
INT8 = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 { %r1 }, ..."
WGMMA = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, ..."
TCGEN = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], ..."


@pytest.mark.parametrize(
    ("line", "expected", "fp8"),
    [
        (MMA, TensorCore("mma", "m16n8k16", "bf16", 1), False),
        (FP8, TensorCore("mma", "m16n8k32", "e4m3", 1), True),
        (INT8, TensorCore("mma", "m16n8k32", "s8", 1), False),
        (WGMMA, TensorCore("wgmma", "m64n128k16", "bf16", 1), False),
        (TCGEN, TensorCore("tcgen05", "", "f16", 1), False),
    ],
)
def test_each_kind_is_recognised(line: str, expected: TensorCore, fp8: bool) -> None:
    found = tensor_core(f"\tmov.b32 %r1, 0;\n\t{line}\n\tret;\n")
    assert found == expected
    assert found.fp8 is fp8


def test_the_most_frequent_one_counts() -> None:
    found = tensor_core("\n".join([MMA, FP8, FP8]))
    assert (found.operands, found.count) == ("e4m3", 3)
    assert str(found) == "mma m16n8k32 e4m3"


def test_a_binary_without_any() -> None:
    assert tensor_core("\tfma.rn.f32 %f1, %f2, %f3, %f4;\n").kind == "none"
