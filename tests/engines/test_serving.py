"""Which kernel serves a checkpoint, per engine, quantisation and GPU; what the engines' own sources say of it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest

from moeopt import engines
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.engines.serving import Checkpoint
from tests.wheels import SGLANG, VLLM, engine_source

SM80, SM90, SM100, SM120 = (GpuSpec.by_name(n) for n in ("NVIDIA A100-SXM4-80GB", "H200", "B200", "rtx 5090"))
GPUS = (SM80, SM90, SM100, SM120)
BF16 = Checkpoint(MoEShape(128, 8, 2048, 256), architecture="SomeMoeForCausalLM")
TENSOR = replace(BF16, shape=replace(BF16.shape, dtype="fp8_w8a8"), method="fp8")
STATIC = replace(TENSOR, static=True)
BLOCKS = replace(TENSOR, shape=replace(TENSOR.shape, block_shape=(128, 128)))
REFINED = replace(TENSOR, shape=replace(TENSOR.shape, block_shape=(64, 64)))
SPREAD = replace(BLOCKS, shape=replace(BLOCKS.shape, ep_size=4))
QWEN35 = replace(BLOCKS, model_types=("qwen3_5_moe", "qwen3_5_moe_text"))
CHANNEL = replace(TENSOR, shape=replace(TENSOR.shape, per_channel=True), method="compressed-tensors")
INT8 = Checkpoint(MoEShape(128, 8, 2048, 256, "int8_w8a8", per_channel=True), method="compressed-tensors")
ONLINE8 = replace(INT8, method="w8a8-int8")
BLOCKS8 = Checkpoint(MoEShape(128, 8, 2048, 256, "int8_w8a8", block_shape=(128, 128)), method="blockwise-int8")
MODELOPT = replace(TENSOR, method="modelopt")
INT4 = Checkpoint(MoEShape(128, 8, 2048, 256, "int4_w4a16", group_size=128))
CT, AWQ, GPTQ, ROUND = (replace(INT4, method=m) for m in ("compressed-tensors", "awq", "gptq", "auto-round"))
GPT_OSS = replace(BF16, architecture="GptOssForCausalLM")
QWEN3 = replace(BF16, architecture="Qwen3MoeForCausalLM")

SGLANG_RULES = [
    # checkpoint, GPU, read, the flag that makes it so
    *[
        (c, gpu, "all", None)
        for c in (BF16, TENSOR, BLOCKS, CHANNEL, ONLINE8, BLOCKS8, MODELOPT)
        for gpu in (SM80, SM90, SM100, SM120)
    ],
    (QWEN3, SM100, "none", "--moe-runner-backend triton"),
    (QWEN3, SM120, "all", None),
    (GPT_OSS, SM120, "none", "--moe-runner-backend triton"),
    (CT, SM90, "none", "--moe-runner-backend triton"),
    (CT, SM100, "all", None),
    (replace(CT, symmetric=False), SM90, "none", None),
    (replace(CT, act_order=True), SM100, "none", None),
    (replace(CT, shape=replace(CT.shape, group_size=64)), SM90, "none", None),
    (AWQ, SM120, "none", "--quantization moe_wna16"),
    (GPTQ, SM90, "none", "--quantization moe_wna16"),
    (replace(GPTQ, act_order=True), SM90, "none", None),
    (ROUND, SM90, "none", None),
]
VLLM_RULES = [
    *[(BF16, gpu, "all", None) for gpu in (SM80, SM90)],
    *[(BF16, gpu, "none", "--moe-backend triton") for gpu in (SM100, SM120)],
    (BLOCKS, SM90, "all", None),
    (SPREAD, SM90, "none", "--moe-backend triton"),
    (BLOCKS, SM100, "none", "--moe-backend triton"),
    (BLOCKS, SM120, "none", "--moe-backend triton or VLLM_MOE_USE_DEEP_GEMM=0"),
    (QWEN35, SM120, "all", None),
    *[(REFINED, gpu, "all", None) for gpu in (SM90, SM100, SM120)],
    (STATIC, SM90, "none", "--moe-backend triton"),
    (STATIC, SM120, "none", "--moe-backend triton"),
    (TENSOR, SM90, "all", None),
    *[(c, SM80, "none", None) for c in (TENSOR, STATIC, BLOCKS, CHANNEL)],
    (CHANNEL, SM100, "some", "--moe-backend triton"),
    (CHANNEL, SM120, "all", None),
    (CHANNEL, SM90, "none", "--moe-backend triton"),
    *[(INT8, gpu, "all", None) for gpu in (SM80, SM90, SM120)],
    (AWQ, SM120, "none", "--quantization moe_wna16"),
    (GPTQ, SM90, "none", "--moe-backend triton"),
    (CT, SM120, "none", "--moe-backend triton"),
    (replace(CT, act_order=True), SM90, "none", None),
    (GPT_OSS, SM120, "all", None),
]
RULES = [("sglang", *rule) for rule in SGLANG_RULES] + [("vllm", *rule) for rule in VLLM_RULES]


@pytest.mark.parametrize(("engine", "checkpoint", "gpu", "reads", "option"), RULES)
def test_what_runs_by_default(
    engine: str, checkpoint: Checkpoint, gpu: GpuSpec, reads: str, option: str | None
) -> None:
    found = engines.get(engine).serving.serving(checkpoint, gpu)
    assert (found.reads, found.option) == (reads, option)
    assert "\n" not in str(found) and found.source in str(found)
    if reads == "some":
        assert found.up_to == 8 and "M <= 8" in str(found)


@pytest.mark.parametrize(
    ("engine", "checkpoint", "version", "option"),
    [
        ("vllm", BLOCKS, (0, 33), "--moe-backend triton"),
        ("vllm", BLOCKS, (0, 14), "VLLM_USE_DEEP_GEMM=0"),
        ("vllm", BF16, (0, 14), None),
        ("vllm", GPTQ, (0, 25, 1), "--quantization moe_wna16"),
        ("vllm", CT, (0, 25, 1), None),
        ("vllm", CT, (0, 27), "--moe-backend triton"),
        ("sglang", CT, (0, 5, 10), None),
        ("sglang", CT, (0, 5, 11), "--moe-runner-backend triton"),
        ("sglang", BF16, (0, 4, 9), None),
    ],
)
def test_options_that_a_release_has(
    engine: str, checkpoint: Checkpoint, version: tuple[int, ...], option: str | None
) -> None:
    assert engines.get(engine).serving.option(checkpoint, version) == option


@pytest.mark.network
@pytest.mark.parametrize(("engine", "version"), [("sglang", SGLANG), ("vllm", VLLM)])
def test_the_functions_that_decide_are_in_the_sources(engine: str, version: str) -> None:
    """A source is a file, or a directory, of the release, and names a function of it."""
    tree = engine_source(engine, version)
    every = [c for e, c, *_ in RULES if e == engine]
    sources = {
        engines.get(engine).serving.serving(c, gpu).source
        for c, gpu in product(every, (None, SM80, SM90, SM100, SM120))
    }
    for source in sources:
        file, _, function = source.partition(": ")
        found = [path for path in tree.rglob(file.rpartition("/")[2]) if path.as_posix().endswith(f"/{file}")]
        assert found, source
        if function:
            assert any(re.search(rf"def {function}\(", path.read_text(encoding="utf-8")) for path in found), source
