"""A quantisation scheme that nobody has, from one row: 8-bit weights of fp16 activations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moeopt.core.config import LaunchConfig
from moeopt.core.dtypes import DTYPES, DTypeSpec
from moeopt.core.gpu import GpuSpec
from moeopt.core.limits import shared_bytes
from moeopt.core.shape import ROLES, MoEShape, Role
from moeopt.core.trial import MAX_RELATIVE_ERROR
from moeopt.errors import InvalidInputError
from moeopt.export import ConfigName, read_config_file
from moeopt.kernels.builtin import BuiltinKernel
from moeopt.kernels.layer import make_batch, make_layer
from moeopt.kernels.memory import memory_needed
from moeopt.kernels.quant import compute_dtype
from moeopt.kernels.reference import reference, relative_error
from moeopt.kernels.work import expert_bytes, launch_work
from moeopt.tuning.options import TuneRequest
from moeopt.tuning.plan import make_plan

NAME, LIKE = "int8_w8a16_half", "int8_w8a16"
H200 = GpuSpec.by_name("H200")
IDS = torch.tensor([[0, 1], [3, 3], [4, -1], [1, 0]])
KINDS = [{}, {"per_channel": True}, {"group_size": 32}]


@pytest.fixture(autouse=True)
def scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(DTYPES, NAME, DTypeSpec("fp16", "int8", ("channel", "group")))
    yield


def made_up(**changes: object) -> MoEShape:
    return MoEShape(5, 2, 96, 64, NAME).replace(**changes)


def test_a_shape_takes_what_the_row_allows() -> None:
    shape = made_up(group_size=32)
    assert MoEShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert shape.slug() == f"E5-top2-K96-N64-{NAME}-g32"
    assert made_up().scales == "channel"
    with pytest.raises(InvalidInputError, match=f"block_shape is for fp8_w8a8 and int8_w8a8, not for dtype '{NAME}'"):
        made_up(block_shape=(32, 32))
    with pytest.raises(InvalidInputError, match=f"group_size is for .*{NAME}"):
        MoEShape(5, 2, 96, 64, group_size=32)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_builtin_kernel_computes_it(kind: dict[str, object], role: Role) -> None:
    shape = made_up(**kind)
    layer = make_layer(shape, device="cpu", seed=0)
    batch = make_batch(layer, role, IDS, seed=1)
    assert batch.a.dtype == compute_dtype(shape) == torch.float16 and batch.a_scale is None
    assert layer.up.q.dtype == (torch.uint8 if shape.group_size else torch.int8)
    out = torch.full((batch.num_pairs, shape.output_rows(role)), torch.nan, dtype=torch.float16)
    BuiltinKernel().bind(layer, role, batch, LaunchConfig(16, 32, 32, 2, 4, 3), out)()
    assert 0 < relative_error(out, reference(layer, role, batch)) < MAX_RELATIVE_ERROR
    weights = layer.weights(role)
    assert weights.scale is not None
    assert expert_bytes(shape, role) * 5 == weights.q.nbytes + weights.scale.nbytes


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_limits_memory_and_work_are_those_of_its_bits(kind: dict[str, object]) -> None:
    shape = made_up(**kind)
    like = shape.replace(dtype=LIKE)
    for config in (LaunchConfig(64, 64, 64, 1, 4, 3), LaunchConfig(16, 64, 64, 1, 4, 3)):
        assert shared_bytes(config, shape, "up", H200) == shared_bytes(config, like, "up", H200)
        assert BuiltinKernel().illegal_reason(config, shape, "up", H200) is None
    assert launch_work(shape, "down", 8) == launch_work(like, "down", 8)
    assert memory_needed(shape, (1, 64)) == memory_needed(like, (1, 64))


@pytest.mark.slow
def test_the_compiler_says_the_same() -> None:
    from moeopt.kernels.target import cross_target

    shape = made_up(hidden_size=512, intermediate_size=256)
    for config in (LaunchConfig(64, 64, 64, 1, 4, 3), LaunchConfig(64, 64, 64, 1, 2, 3)):
        with cross_target((9, 0)):
            compiled = BuiltinKernel().compile(shape, "up", 64, config)
        assert compiled.shared_bytes == shared_bytes(config, shape, "up", H200)


def test_plan_and_files(tmp_path: Path) -> None:
    shape = made_up(hidden_size=2048, intermediate_size=512)
    plan = make_plan(TuneRequest(shape, "H200", batch_sizes=(8, 64)), "3.6.0")
    assert 0 < plan.legal <= plan.configs and plan.seconds is not None
    name = ConfigName.of("sglang", shape, "NVIDIA H200")
    assert str(name) == f"E=5,N=512,device_name=NVIDIA_H200,dtype={NAME}.json"
    path = tmp_path / "configs" / "triton_3_6_0" / str(name)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"64": LaunchConfig(16, 64, 64, 1, 4, 3).to_dict()}))
    assert [p for p in read_config_file(path, engine="sglang").problems if p.severity != "note"] == []
