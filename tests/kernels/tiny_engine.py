"""A kernel file of a made-up engine, small enough to be read and changed by tests."""

from __future__ import annotations

from pathlib import Path

SOURCE = """
import functools
import triton
import triton.language as tl
import sglang.srt.envs as envs
from sglang.srt.utils import is_cuda, is_sm90_supported, rounded
from sglang.srt.base import Base, register

_fast = is_cuda() and not envs.SLOW.get()
_limit = rounded(64)


@functools.lru_cache(maxsize=8)
def swapped(block_m):
    return is_sm90_supported() and block_m < 64


@triton.jit
def fused_moe_kernel(
    a_ptr, b_ptr, c_ptr, topk_weights_ptr, sorted_token_ids_ptr, expert_ids_ptr, num_tokens_post_padded_ptr,
    N, K, EM, num_valid_tokens,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr, top_k: tl.constexpr, compute_type: tl.constexpr, swap_ab: tl.constexpr,
):
    rows = tl.load(num_tokens_post_padded_ptr)
    tl.store(c_ptr + tl.program_id(0), rows.to(compute_type))


fused_moe_kernel_gptq_awq = fused_moe_kernel


def invoke_fused_moe_kernel(
    A, B, C, topk_weights, topk_ids, sorted_token_ids, expert_ids, num_tokens_post_padded,
    mul_routed_weight: bool, top_k: int, config: "Base[int]", compute_type, block_shape=None,
) -> Base:
    assert block_shape is None, "no blocks here"
    grid = lambda META: (triton.cdiv(sorted_token_ids.shape[0], META["BLOCK_SIZE_M"]),)
    fused_moe_kernel[grid](
        A, B, C, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded,
        B.shape[1], B.shape[2], sorted_token_ids.shape[0], topk_ids.numel(),
        MUL_ROUTED_WEIGHT=mul_routed_weight, top_k=top_k, compute_type=compute_type,
        swap_ab=swapped(config["BLOCK_SIZE_M"]), **config,
    )


class Served(Base):
    raise RuntimeError("no launch is made of a class")


@register("operator")
def served():
    raise RuntimeError("never called")


register(served)
"""


def write(folder: Path, *changes: tuple[str, str], name: str = "fused_moe_triton_kernels.py") -> Path:
    """The kernel file with some of its text replaced.

    Args:
        folder: Where it is written.
        changes: (old, new) pairs; each old text must be there.
        name: The file's name.
    """
    text = SOURCE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
