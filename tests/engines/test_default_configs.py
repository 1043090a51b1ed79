"""The engines' defaults, at the edges of their rules (SGLang 0.5.23, vLLM 0.33.0)."""

from __future__ import annotations

from typing import Any

import pytest

from moeopt import GpuSpec, MoEShape, engines

H200 = GpuSpec.by_name("H200")
SM120 = GpuSpec.by_name("RTX 5090")
BF16 = MoEShape(64, 8, 2048, 512)
FP8 = BF16.replace(dtype="fp8_w8a8")
BLOCK = BF16.replace(dtype="fp8_w8a8", block_shape=(128, 128))


@pytest.mark.parametrize(
    ("shape", "m", "gpu", "text"),
    [
        (BF16, 1, H200, "16x32x64 G1 w4 s3"),
        (BF16, 64, H200, "16x32x64 G1 w4 s3"),
        (BF16, 65, H200, "64x64x32 G8 w4 s3"),
        (BF16.replace(dtype="fp16"), 65, SM120, "64x64x32 G8 w4 s3"),
        (BF16.replace(dtype="int8_w8a8"), 64, H200, "16x32x64 G1 w4 s3"),
        (BF16.replace(dtype="int4_w4a16", group_size=128), 4096, H200, "64x64x32 G8 w4 s3"),
        (BLOCK, 1, H200, "64x128x128 G32 w4 s3"),
        (BLOCK, 4096, SM120, "64x128x128 G32 w4 s3"),
        (BLOCK.replace(block_shape=(64, 32)), 8, SM120, "64x64x32 G32 w4 s3"),
        (FP8, 64, H200, "64x128x128 G1 w4 s4"),
        (FP8, 65, H200, "128x256x128 G32 w8 s4"),
        (FP8, 64, SM120, "32x64x256 G1 w4 s4"),
        (FP8, 65, SM120, "64x128x256 G64 w4 s2"),
    ],
)
def test_sglang(shape: MoEShape, m: int, gpu: GpuSpec, text: str) -> None:
    assert str(engines.get("sglang").default_config(shape, m, gpu)) == text


@pytest.mark.parametrize(
    ("shape", "m", "text"),
    [
        (BF16, 1, "16x64x128 G1 w4 s4"),
        (BF16, 32, "16x64x128 G1 w4 s4"),
        (BF16, 33, "32x64x128 G1 w4 s3"),
        (BF16, 64, "32x64x128 G1 w4 s3"),
        (BF16, 65, "32x128x64 G1 w4 s3"),
        (BF16, 97, "64x128x64 G1 w4 s3"),
        (BF16, 128, "64x128x64 G1 w4 s3"),
        (BF16, 129, "64x128x64 G1 w8 s3"),
        (BF16, 513, "128x128x64 G1 w8 s3"),
        (BF16, 64 * 128, "128x128x64 G1 w8 s3"),
        (BF16, 64 * 129, "128x128x64 G16 w8 s3"),
        (FP8, 4096, "128x128x128 G1 w8 s3"),
        (BLOCK, 4, "16x64x128 G1 w4 s4"),
        (BLOCK, 5, "16x64x128 G1 w4 s3"),
        (BLOCK, 9, "16x128x128 G1 w4 s3"),
        (BLOCK, 17, "16x128x128 G32 w4 s3"),
        (BLOCK, 65, "64x128x128 G32 w4 s3"),
        (BLOCK.replace(block_shape=(32, 128)), 1, "16x32x128 G1 w4 s3"),
    ],
)
def test_vllm(shape: MoEShape, m: int, text: str) -> None:
    assert str(engines.get("vllm").default_config(shape, m, H200)) == text


@pytest.mark.parametrize("changes", [{"gated": False}, {"top_k": 2}, {"ep_size": 4}, {"hidden_size": 512}])
def test_only_experts_dtype_and_batch_size_matter(changes: dict[str, Any]) -> None:
    for engine in ("sglang", "vllm"):
        for m in (1, 16, 300, 5000):
            default = engines.get(engine).default_config
            assert default(BF16, m, H200) == default(BF16.replace(**changes), m, H200)
