from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt import MoEShape
from moeopt.core.shape import DEFAULT_BATCH_SIZES, DTYPES, check_batch_sizes
from moeopt.errors import InvalidInputError, MoeoptError

BF16 = MoEShape(num_experts=256, top_k=8, hidden_size=3072, intermediate_size=256)


@st.composite
def shapes(draw: st.DrawFn) -> MoEShape:
    """Any shape that is valid."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    spec = DTYPES[dtype]
    sizes = st.integers(1, 1 << 20)
    eight = spec.weight_bits == 8
    experts, ep = draw(st.integers(1, 512)), draw(st.sampled_from([1, 2, 8]))
    top_k = draw(st.integers(1, min(64, experts * ep)))
    block = draw(st.none() | st.tuples(sizes, sizes)) if eight and spec.activation_bits == 8 else None
    groups = st.sampled_from([16, 32, 64, 128])
    return MoEShape(
        num_experts=experts,
        top_k=top_k,
        hidden_size=draw(sizes),
        intermediate_size=draw(sizes),
        dtype=dtype,
        block_shape=block,
        per_channel=draw(st.booleans()) if eight and block is None else False,
        group_size=draw(groups)
        if dtype == "int4_w4a16"
        else draw(st.none() | groups)
        if dtype == "int8_w8a16"
        else None,
        gated=draw(st.booleans()),
        shared_experts=draw(st.integers(0, min(top_k, experts))),
        ep_size=ep,
    )


@given(shapes())
def test_round_trip_through_json(shape: MoEShape) -> None:
    assert MoEShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert shape.replace() == shape
    assert hash(shape) == hash(shape.replace())


@given(shapes(), shapes())
def test_shapes_that_differ_have_other_dicts(a: MoEShape, b: MoEShape) -> None:
    assert (a == b) == (a.to_dict() == b.to_dict())


@given(shapes())
def test_slug_is_a_plain_file_name(shape: MoEShape) -> None:
    assert shape.slug().startswith(f"E{shape.num_experts}-top{shape.top_k}-K{shape.hidden_size}-N")
    assert all(c.isalnum() or c in "-_" for c in shape.slug())


def test_slug_tells_what_is_not_the_default() -> None:
    assert BF16.slug() == "E256-top8-K3072-N256-bf16"
    shape = MoEShape(257, 9, 6144, 256, "fp8_w8a8", block_shape=(128, 128), shared_experts=1)
    assert shape.slug() == "E257-top9-K6144-N256-fp8_w8a8-b128x128-shared1"
    assert (
        MoEShape(8, 2, 64, 64, "int4_w4a16", group_size=32, gated=False, ep_size=4)
        .slug()
        .endswith("int4_w4a16-g32-ungated-ep4")
    )
    assert MoEShape(8, 2, 64, 64, "fp8_w8a8", per_channel=True).slug().endswith("-channel")


def test_dict_leaves_out_what_is_at_its_default() -> None:
    assert BF16.to_dict() == {
        "num_experts": 256, "top_k": 8, "hidden_size": 3072, "intermediate_size": 256, "dtype": "bf16",
        "block_shape": None,
    }  # fmt: skip


def test_rows_and_reductions() -> None:
    assert (BF16.output_rows("up"), BF16.reduction("up")) == (512, 3072)
    assert (BF16.output_rows("down"), BF16.reduction("down")) == (3072, 256)
    assert BF16.replace(gated=False).output_rows("up") == 256


BAD: list[tuple[dict[str, Any], str]] = [
    *[({name: bad}, name) for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "ep_size")
      for bad in (0, -1, 1.0, "8", None, True)],
    ({"dtype": "fp4"}, "dtype 'fp4' is unknown"),
    ({"dtype": None}, "dtype"),
    ({"dtype": ["bf16"]}, "dtype"),
    ({"top_k": 257}, "top_k 257 is greater than the 256 experts"),
    ({"shared_experts": 9}, "shared_experts is 9: give 0 to 8"),
    ({"shared_experts": -1}, "shared_experts"),
    ({"shared_experts": True}, "shared_experts"),
    ({"per_channel": "yes"}, "per_channel is 'yes'"),
    ({"gated": 1}, "gated is 1"),
    ({"per_channel": True}, "per_channel is for fp8_w8a8, int8_w8a16 and int8_w8a8"),
    ({"block_shape": (128, 128)}, "block_shape is for fp8_w8a8 and int8_w8a8"),
    ({"dtype": "fp8_w8a8", "block_shape": (128,)}, "give two sizes"),
    ({"dtype": "fp8_w8a8", "block_shape": 128}, "give two sizes"),
    ({"dtype": "fp8_w8a8", "block_shape": (128, 0)}, "give two sizes"),
    ({"dtype": "fp8_w8a8", "block_shape": (128, "128")}, "give two sizes"),
    ({"dtype": "fp8_w8a8", "block_shape": (128, 128), "per_channel": True}, "exclude each other"),
    ({"dtype": "int8_w8a16", "block_shape": (128, 128)}, "block_shape is for"),
    ({"group_size": 128}, "group_size is for int4_w4a16 and int8_w8a16"),
    ({"dtype": "int4_w4a16"}, "int4_w4a16 needs a group_size"),
    ({"dtype": "int4_w4a16", "group_size": 0}, "group_size is 0"),
    ({"dtype": "int4_w4a16", "group_size": True}, "group_size is True"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), BAD)
def test_what_cannot_be_is_one_clear_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        BF16.replace(**changes)
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(InvalidInputError):
        MoEShape.from_dict({**BF16.to_dict(), **changes})


def test_top_k_may_exceed_the_local_experts_with_expert_parallelism() -> None:
    assert BF16.replace(num_experts=4, ep_size=64).top_k == 8


def test_block_shape_is_a_tuple_whatever_was_given() -> None:
    shape = MoEShape.from_dict({**BF16.to_dict(), "dtype": "fp8_w8a8", "block_shape": [128, 64]})
    assert shape.block_shape == (128, 64)
    hash(shape)


def test_from_dict_names_the_key() -> None:
    with pytest.raises(InvalidInputError, match=r"shape key 'experts' is unknown: the keys are .*num_experts"):
        MoEShape.from_dict({**BF16.to_dict(), "experts": 8})
    with pytest.raises(InvalidInputError, match="shape key 'top_k' is missing"):
        MoEShape.from_dict({"num_experts": 8, "hidden_size": 64, "intermediate_size": 64})


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
FIELDS = st.sampled_from([*BF16.to_dict(), "per_channel", "group_size", "gated", "shared_experts", "ep_size"])


@given(st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(FIELDS, x)))
def test_from_dict_of_anything(value: Any) -> None:
    data = {**BF16.to_dict(), **value} if isinstance(value, dict) else value
    try:
        MoEShape.from_dict(data)
    except MoeoptError as error:
        assert "\n" not in str(error)


def test_batch_sizes() -> None:
    assert check_batch_sizes([64, 1, 64, 8]) == (1, 8, 64)
    assert check_batch_sizes(DEFAULT_BATCH_SIZES) == DEFAULT_BATCH_SIZES and len(DEFAULT_BATCH_SIZES) == 18
    for bad in ([], (), None, 64, "64", [0], [-1], [1.5], [True], ["8"]):
        with pytest.raises(InvalidInputError, match="batch size"):
            check_batch_sizes(bad)
