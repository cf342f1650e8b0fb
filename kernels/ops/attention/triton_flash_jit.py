"""Kernel of ``triton_flash``, and the parts that ``triton_split_kv`` shares with it.

Imported at launch alone: everything else of the variant works where triton is absent.
"""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    pointers, inside_rows, inside_depth, EVEN_ROWS: tl.constexpr, EVEN_D: tl.constexpr, WIDEN: tl.constexpr
):
    """A tile of queries, keys or values, zero outside. WIDEN casts to float32: the interpreter miscounts bfloat16."""
    if EVEN_ROWS and EVEN_D:
        tile = tl.load(pointers)
    elif EVEN_ROWS:
        tile = tl.load(pointers, mask=inside_depth, other=0.0)
    elif EVEN_D:
        tile = tl.load(pointers, mask=inside_rows, other=0.0)
    else:
        tile = tl.load(pointers, mask=inside_rows & inside_depth, other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def attend_keys(
    q,
    accumulator,
    peak,
    total,
    k_ptr,
    v_ptr,
    rows,
    first,
    end,
    kv_len,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add the keys from ``first`` up to ``end`` (a multiple of BLOCK_N later, if not MASKED) to the online softmax.

    Scores are exponents of 2: SCALE is log2(e) / sqrt(head_dim). MASKED blocks hide the keys from kv_len on and, if
    CAUSAL, those after their query; each row must have seen a key by the end of its first block.
    """
    depth = tl.arange(0, BLOCK_D)
    inside_depth = depth < HEAD_DIM
    for start in range(first, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < kv_len
        k = load_rows(
            k_ptr + keys[None, :] * HEAD_DIM + depth[:, None], inside[None, :], inside_depth[:, None],
            not MASKED, HEAD_DIM == BLOCK_D, WIDEN,
        )  # fmt: skip
        scores = tl.dot(q, k, input_precision=PRECISION) * SCALE
        if MASKED:
            visible = inside[None, :]
            if CAUSAL:
                visible = visible & (keys[None, :] <= rows[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(peak - higher)
        total = total * rescale + tl.sum(weights, 1)
        v = load_rows(
            v_ptr + keys[:, None] * HEAD_DIM + depth[None, :], inside[:, None], inside_depth[None, :],
            not MASKED, HEAD_DIM == BLOCK_D, WIDEN,
        )  # fmt: skip
        accumulator = tl.dot(
            weights.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION
        )
        peak = higher
    return accumulator, peak, total


@triton.jit
def attention_flash(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    q_len,
    kv_len,
    group,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_M: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One program BLOCK_M queries of one head, over all the keys that they see. All tensors are contiguous.

    Heads are counted in 64 bits, elements of a head in 32. ``group`` heads of q share a head of k and v.
    """
    tiles = tl.cdiv(q_len, BLOCK_M)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        # The last queries see the most keys: they begin first, so that the last programs to run are short.
        tile = tiles - 1 - tile
    first_row = tile * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_D)
    inside_rows = (rows < q_len)[:, None]
    inside_depth = (depth < HEAD_DIM)[None, :]
    places = rows[:, None] * HEAD_DIM + depth[None, :]
    q_start = head * q_len * HEAD_DIM
    kv_start = (head // group) * kv_len * HEAD_DIM
    q = load_rows(q_ptr + q_start + places, inside_rows, inside_depth, EVEN_M, HEAD_DIM == BLOCK_D, WIDEN)
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # Blocks that every row sees whole need no mask.
    if CAUSAL:
        end = min(kv_len, first_row + BLOCK_M)
        whole = min(kv_len, first_row + 1) // BLOCK_N * BLOCK_N
    else:
        end = kv_len
        whole = kv_len // BLOCK_N * BLOCK_N
    accumulator, peak, total = attend_keys(
        q, accumulator, peak, total, k_ptr + kv_start, v_ptr + kv_start, rows, 0, whole, kv_len,
        HEAD_DIM, SCALE, BLOCK_N, BLOCK_D, CAUSAL, False, PRECISION, WIDEN,
    )  # fmt: skip
    if CAUSAL or not EVEN_N:
        accumulator, peak, total = attend_keys(
            q, accumulator, peak, total, k_ptr + kv_start, v_ptr + kv_start, rows, whole, end, kv_len,
            HEAD_DIM, SCALE, BLOCK_N, BLOCK_D, CAUSAL, True, PRECISION, WIDEN,
        )  # fmt: skip
    result = (accumulator / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_start + places, result, mask=inside_rows & inside_depth)
