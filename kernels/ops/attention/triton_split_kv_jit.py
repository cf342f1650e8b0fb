"""Kernels of ``triton_split_kv``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.attention.triton_flash_jit import attend_keys, load_rows


@triton.jit
def attention_partial(
    q_ptr,
    k_ptr,
    v_ptr,
    parts_ptr,
    logs_ptr,
    rows_of_group,
    all_rows,
    kv_len,
    slice_keys,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_M: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program BLOCK_M query rows against one slice of the keys of the head that they share.

    ``slice_keys`` is a multiple of BLOCK_N. Writes the slice's output in float32 to parts [SPLIT, all_rows, HEAD_DIM], and
    to logs [SPLIT, all_rows] the base-2 logarithm of the sum of the slice's exponentials.
    """
    tiles = tl.cdiv(rows_of_group, BLOCK_M)
    tile = tl.program_id(0) % tiles
    part = (tl.program_id(0) // tiles) % SPLIT
    product = (tl.program_id(0) // (tiles * SPLIT)).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    depth = tl.arange(0, BLOCK_D)
    inside_rows = rows < rows_of_group
    inside_depth = (depth < HEAD_DIM)[None, :]
    places = rows[:, None] * HEAD_DIM + depth[None, :]
    first_row = product * rows_of_group
    kv_start = product * kv_len * HEAD_DIM
    q = load_rows(
        q_ptr + first_row * HEAD_DIM + places, inside_rows[:, None], inside_depth,
        EVEN_M, HEAD_DIM == BLOCK_D, WIDEN,
    )  # fmt: skip
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    first = part * slice_keys
    end = min(first + slice_keys, kv_len)
    whole = end // BLOCK_N * BLOCK_N
    accumulator, peak, total = attend_keys(
        q, accumulator, peak, total, k_ptr + kv_start, v_ptr + kv_start, rows, first, whole, kv_len,
        HEAD_DIM, SCALE, BLOCK_N, BLOCK_D, False, False, PRECISION, WIDEN,
    )  # fmt: skip
    accumulator, peak, total = attend_keys(
        q, accumulator, peak, total, k_ptr + kv_start, v_ptr + kv_start, rows, whole, end, kv_len,
        HEAD_DIM, SCALE, BLOCK_N, BLOCK_D, False, True, PRECISION, WIDEN,
    )  # fmt: skip
    written = part.to(tl.int64) * all_rows + first_row
    tl.store(
        parts_ptr + written * HEAD_DIM + places,
        accumulator / total[:, None],
        mask=inside_rows[:, None] & inside_depth,
    )
    tl.store(logs_ptr + written + rows, peak + tl.log2(total), mask=inside_rows)


@triton.jit
def combine_parts(
    parts_ptr, logs_ptr, out_ptr, all_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr
):
    """One program one row: the average of its parts, each weighted by the sum of its exponentials."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLIT).to(tl.int64)
    depth = tl.arange(0, BLOCK_D)
    logs = tl.load(logs_ptr + part * all_rows + row)
    weights = tl.exp2(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    places = (part * all_rows + row)[:, None] * HEAD_DIM + depth[None, :]
    parts = tl.load(parts_ptr + places, mask=(depth < HEAD_DIM)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + depth, result, mask=depth < HEAD_DIM)
