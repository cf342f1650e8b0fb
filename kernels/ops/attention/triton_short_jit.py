"""Kernel of ``triton_short``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.attention.triton_flash_jit import load_rows


@triton.jit
def attend_head(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    product,
    rows,
    rows_of_group,
    q_len,
    kv_len,
    keys_seen,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_M: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """The query rows ``rows`` against all the keys of head ``product`` of k and v, with one softmax over each whole row.

    Scores are exponents of 2: SCALE is log2(e) / sqrt(head_dim).
    """
    keys = tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_D)
    inside_rows = rows < rows_of_group
    inside_keys = keys < keys_seen
    inside_depth = depth < HEAD_DIM
    places = rows[:, None] * HEAD_DIM + depth[None, :]
    q_start = product * rows_of_group * HEAD_DIM
    kv_start = product * kv_len * HEAD_DIM
    q = load_rows(
        q_ptr + q_start + places, inside_rows[:, None], inside_depth[None, :],
        EVEN_M, HEAD_DIM == BLOCK_D, WIDEN,
    )  # fmt: skip
    k = load_rows(
        k_ptr + kv_start + keys[None, :] * HEAD_DIM + depth[:, None], inside_keys[None, :], inside_depth[:, None],
        EVEN_N, HEAD_DIM == BLOCK_D, WIDEN,
    )  # fmt: skip
    v = load_rows(
        v_ptr + kv_start + keys[:, None] * HEAD_DIM + depth[None, :], inside_keys[:, None], inside_depth[None, :],
        EVEN_N, HEAD_DIM == BLOCK_D, WIDEN,
    )  # fmt: skip
    scores = tl.dot(q, k, input_precision=PRECISION) * SCALE
    if CAUSAL:
        # Every row sees key 0, rows beyond the last one too.
        query = rows % q_len if GROUPED else rows
        visible = inside_keys[None, :] & (keys[None, :] <= query[:, None])
        scores = tl.where(visible, scores, -float("inf"))
    elif not EVEN_N:
        scores = tl.where(inside_keys[None, :], scores, -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)
    attended = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    result = (attended / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_start + places, result, mask=inside_rows[:, None] & inside_depth[None, :])


@triton.jit
def attention_short(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    rows_of_group,
    q_len,
    kv_len,
    keys_seen,
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
    GROUPED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program BLOCK_M query rows of each of HEADS neighbouring heads of k and v. All tensors are contiguous.

    HEADS divides the heads of k and v of all sequences together. The queries of the heads that share one are
    ``rows_of_group`` rows, ``q_len`` of each; they see its first ``keys_seen`` keys, of ``kv_len``. GROUPED says that several
    heads of q share one. Heads are counted in 64 bits, elements of a head in 32.
    """
    tiles = tl.cdiv(rows_of_group, BLOCK_M)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (tl.program_id(0) // tiles).to(tl.int64) * HEADS
    if HEADS == 1:
        attend_head(
            q_ptr, k_ptr, v_ptr, out_ptr, first, rows, rows_of_group, q_len, kv_len, keys_seen,
            HEAD_DIM, SCALE, BLOCK_N, BLOCK_D, EVEN_M, PRECISION, WIDEN, EVEN_N, CAUSAL, GROUPED,
        )  # fmt: skip
    else:
        for number in range(0, HEADS):
            attend_head(
                q_ptr, k_ptr, v_ptr, out_ptr, first + number, rows, rows_of_group, q_len, kv_len, keys_seen,
                HEAD_DIM, SCALE, BLOCK_N, BLOCK_D, EVEN_M, PRECISION, WIDEN, EVEN_N, CAUSAL, GROUPED,
            )  # fmt: skip
