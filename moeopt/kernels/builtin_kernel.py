# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (Triton gives the arguments their types.)
"""The device code of the builtin kernel: every dtype and scheme, both roles.

One program computes one tile of C = A x W[expert]^T. It uses no function that Triton itself defines
with ``jit``, so that the interpreter can run it in a process that also compiles.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs", "tiles_m"])
def moe_kernel(
    a_ptr,
    w_ptr,
    c_ptr,
    a_scale_ptr,
    w_scale_ptr,
    routed_weight_ptr,
    sorted_ids_ptr,
    expert_ids_ptr,
    num_padded_ptr,
    rows,
    K,
    w_stride,
    num_pairs,
    tiles_m,
    SCHEME: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUTED_WEIGHT: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """C[pair, :] = A[pair // TOP_K, :] x W[expert of pair]^T, one [BLOCK_SIZE_M, BLOCK_SIZE_N] tile.

    Args:
        a_ptr: [tokens, K].
        w_ptr: [E, rows, w_stride], K contiguous; 4-bit: two elements per byte.
        c_ptr: [pairs, rows].
        a_scale_ptr: Scales of A, or None.
        w_scale_ptr: Scales of W, or None.
        routed_weight_ptr: [pairs] float32.
        sorted_ids_ptr: [tiles_m * BLOCK_SIZE_M] pair of each row; num_pairs in padding.
        expert_ids_ptr: [tiles_m] expert of each tile, -1 for an expert on another GPU.
        num_padded_ptr: [1] rows in use.
        rows: Output rows of one expert.
        K: Length of the dot products.
        w_stride: Stored elements of one row of W.
        num_pairs: M * top_k.
        tiles_m: Tiles along M.
        SCHEME: none, tensor, channel, block or group.
        BITS: Bits of one element of W.
        GROUP_N: Rows of W that share a scale (block).
        GROUP_K: Elements along K that share a scale (block, group).
        TOP_K: Pairs that share a row of A: top_k for up, 1 for down.
        ROUTED_WEIGHT: Whether to multiply by the routed weight.
        EVEN_N: Whether BLOCK_SIZE_N divides rows.
        EVEN_K: Whether BLOCK_SIZE_K divides K.
        SWAP_AB: Compute the transposed tile, so that the weights fill the tensor core's 64 rows.
        DEPENDENT_LAUNCH: Programmatic dependent launch: start while the kernel before drains.
    """
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Tiles of the same columns run together for GROUP_SIZE_M tiles along M, so that L2 holds them.
    pid = tl.program_id(0)
    tiles_n = (rows + BLOCK_SIZE_N - 1) // BLOCK_SIZE_N
    group = pid // (GROUP_SIZE_M * tiles_n)
    within = pid - group * GROUP_SIZE_M * tiles_n
    group_rows = tl.minimum(tiles_m - group * GROUP_SIZE_M, GROUP_SIZE_M)
    tile_m = group * GROUP_SIZE_M + within % group_rows
    tile_n = within // group_rows

    row = tile_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    num_padded = tl.load(num_padded_ptr)
    expert = tl.load(expert_ids_ptr + tile_m)
    pair = tl.load(sorted_ids_ptr + row)
    if tile_m * BLOCK_SIZE_M >= num_padded:
        return

    valid = pair < num_pairs
    column = tile_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    w_row = column if EVEN_N else tl.minimum(column, rows - 1)
    a_row = (pair // TOP_K).to(tl.int64)
    # A tile without an expert here multiplies nothing, and stores zeros.
    k_end = tl.where(expert < 0, 0, K)
    expert_64 = tl.maximum(expert, 0).to(tl.int64)
    k_index = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + a_row[:, None] * K + k_index[None, :]
    # Elements of the stored row that one step reads, and how many of them one stands for.
    PACK: tl.constexpr = 8 // BITS if BITS < 8 else 1
    w_index = tl.arange(0, BLOCK_SIZE_K // PACK)
    w_ptrs = w_ptr + expert_64 * rows * w_stride + w_row[None, :] * w_stride + w_index[:, None]

    if SCHEME == "tensor":
        a_scale = tl.load(a_scale_ptr)
        w_scale = tl.load(w_scale_ptr + expert_64)
    elif SCHEME == "channel":
        w_scale = tl.load(w_scale_ptr + expert_64 * rows + w_row)
        if a_scale_ptr is not None:
            a_scale = tl.load(a_scale_ptr + a_row, mask=valid, other=0.0)
    elif SCHEME == "block":
        k_groups = (K + GROUP_K - 1) // GROUP_K
        n_groups = (rows + GROUP_N - 1) // GROUP_N
        a_scale_ptrs = a_scale_ptr + a_row * k_groups
        w_scale_ptrs = w_scale_ptr + expert_64 * n_groups * k_groups
        if GROUP_N % BLOCK_SIZE_N == 0:
            w_scale_ptrs += tile_n * BLOCK_SIZE_N // GROUP_N * k_groups
        else:
            w_scale_ptrs += w_row // GROUP_N * k_groups
    elif SCHEME == "group":
        k_groups = K // GROUP_K
        w_scale_ptrs = w_scale_ptr + expert_64 * rows * k_groups + w_row * k_groups

    # int8 products are summed exactly in int32 where one scale serves all of K.
    INTEGER: tl.constexpr = a_ptr.dtype.element_ty == tl.int8 and SCHEME != "block"
    ACC: tl.constexpr = tl.int32 if INTEGER else tl.float32
    if SWAP_AB:
        acc = tl.full((BLOCK_SIZE_N, BLOCK_SIZE_M), 0, dtype=ACC)
    else:
        acc = tl.full((BLOCK_SIZE_M, BLOCK_SIZE_N), 0, dtype=ACC)

    for k in range(0, k_end, BLOCK_SIZE_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
            w = tl.load(w_ptrs)
        else:
            a = tl.load(a_ptrs, mask=valid[:, None] & (k_index < K - k)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(w_index < w_stride - k // PACK)[:, None], other=0.0)
        if SCHEME == "block":
            scale_a = tl.load(a_scale_ptrs + k // GROUP_K, mask=valid, other=0.0)
            scale_w = tl.load(w_scale_ptrs + k // GROUP_K)
            if SWAP_AB:
                product = tl.dot(tl.trans(w), tl.trans(a)).to(tl.float32)
                if GROUP_N % BLOCK_SIZE_N == 0:
                    acc += product * (scale_a * scale_w)[None, :]
                else:
                    acc += product * scale_w[:, None] * scale_a[None, :]
            else:
                product = tl.dot(a, w).to(tl.float32)
                if GROUP_N % BLOCK_SIZE_N == 0:
                    acc += product * (scale_a * scale_w)[:, None]
                else:
                    acc += product * scale_a[:, None] * scale_w[None, :]
        elif SCHEME == "group":
            if BITS == 4:
                # Even elements are the low halves: interleave both halves along K.
                w = tl.join(w & 0xF, w >> 4).permute(0, 2, 1).reshape(BLOCK_SIZE_K, BLOCK_SIZE_N)
                values = w.to(tl.float32) - 8.0
            else:
                values = w.to(tl.float32) - 128.0
            if GROUP_K % BLOCK_SIZE_K == 0:
                scale_w = tl.load(w_scale_ptrs + k // GROUP_K).to(tl.float32)
                acc += tl.dot(a, values.to(a.dtype)) * scale_w[None, :]
            else:
                g_index = tl.arange(0, BLOCK_SIZE_K // GROUP_K)
                scale_w = tl.load(
                    w_scale_ptrs[None, :] + k // GROUP_K + g_index[:, None],
                    mask=(g_index < k_groups - k // GROUP_K)[:, None],
                    other=0.0,
                ).to(tl.float32)
                scale_w = tl.broadcast_to(scale_w[:, None, :], (BLOCK_SIZE_K // GROUP_K, GROUP_K, BLOCK_SIZE_N))
                scaled = values * scale_w.reshape(BLOCK_SIZE_K, BLOCK_SIZE_N)
                acc = tl.dot(a, scaled.to(a.dtype), acc)
        elif SWAP_AB:
            acc = tl.dot(tl.trans(w), tl.trans(a), acc)
        elif INTEGER:
            acc = tl.dot(a, w, acc, out_dtype=tl.int32)
        elif BITS == 8 and SCHEME == "channel" and a_scale_ptr is None:
            acc = tl.dot(a, w.to(tl.float32).to(a.dtype), acc)
        else:
            acc = tl.dot(a, w, acc)
        a_ptrs += BLOCK_SIZE_K
        w_ptrs += BLOCK_SIZE_K // PACK

    result = acc.to(tl.float32)
    if SWAP_AB:
        result = tl.trans(result)
    if SCHEME == "tensor":
        result *= a_scale * w_scale
    elif SCHEME == "channel":
        result *= w_scale[None, :]
        if a_scale_ptr is not None:
            result *= a_scale[:, None]
    if ROUTED_WEIGHT:
        result *= tl.load(routed_weight_ptr + pair, mask=valid, other=0.0)[:, None]
    c_ptrs = c_ptr + pair.to(tl.int64)[:, None] * rows + column[None, :]
    c_mask = valid[:, None] if EVEN_N else valid[:, None] & (column < rows)[None, :]
    tl.store(c_ptrs, result.to(c_ptr.dtype.element_ty), mask=c_mask)
