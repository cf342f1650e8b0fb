"""Kernels of ``triton_grouped`` and of its persistent and split-K relatives. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import multiply_tile, store_tile, tile_of


@triton.jit
def tile_ends(offsets_ptr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """For each group, the number of tiles of BLOCK_M rows up to its end; slots beyond GROUPS repeat the last."""
    group = tl.arange(0, SLOTS)
    end = tl.load(offsets_ptr + group, mask=group < GROUPS, other=0)
    start = tl.load(offsets_ptr + group - 1, mask=(group > 0) & (group < GROUPS), other=0)
    return tl.cumsum(tl.cdiv(end - start, BLOCK_M), 0)


@triton.jit
def group_tile(
    row_tile,
    column_tile,
    ends,
    a_ptr,
    b_ptr,
    offsets_ptr,
    c_ptr,
    first_k,
    end_k,
    N,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Multiply over k from first_k to end_k, and store, one tile of C: the row_tile-th of all groups' tiles.

    ``ends`` are the groups' ``tile_ends``.
    """
    before = ends <= row_tile
    # Every group that ends at or before this tile precedes its group, empty ones included.
    group = tl.sum(before.to(tl.int32), 0)
    first_tile = tl.max(tl.where(before, ends, 0), 0)
    start = tl.load(offsets_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets_ptr + group)
    rows = start + (row_tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = multiply_tile(
        a_ptr, b_ptr + group.to(tl.int64) * stride_bg, rows, columns, first_k, end_k, end, N, stride_am, stride_ak,
        stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, False, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
    )  # fmt: skip
    store_tile(c_ptr, tile, rows, columns, end, N, False, EVEN_N, WIDE)


@triton.jit
def grouped_tiled(
    a_ptr,
    b_ptr,
    offsets_ptr,
    c_ptr,
    row_tiles,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bk,
    stride_bn,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """C[rows of g] = A[rows of g] @ B[g]: one program a tile of C, whose rows belong to one group.

    The grid holds ``row_tiles`` x the tiles along N, enough for any offsets; programs beyond the tiles that these
    offsets give have nothing to do.
    """
    row, column = tile_of(tl.program_id(0), row_tiles, N, 1, BLOCK_N, GROUP_M)
    ends = tile_ends(offsets_ptr, GROUPS, SLOTS, BLOCK_M)
    if row >= tl.max(ends, 0):
        return
    group_tile(
        row, column, ends, a_ptr, b_ptr, offsets_ptr, c_ptr, 0, K, N, stride_am, stride_ak, stride_bg, stride_bk, stride_bn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
    )  # fmt: skip


@triton.jit
def grouped_persistent(
    a_ptr,
    b_ptr,
    offsets_ptr,
    c_ptr,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bk,
    stride_bn,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """As ``grouped_tiled``; program p of P makes the tiles p, p + P, p + 2 P, ... of those that the offsets give."""
    ends = tile_ends(offsets_ptr, GROUPS, SLOTS, BLOCK_M)
    row_tiles = tl.max(ends, 0)
    for tile in range(tl.program_id(0), row_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        row, column = tile_of(tile, row_tiles, N, 1, BLOCK_N, GROUP_M)
        group_tile(
            row, column, ends, a_ptr, b_ptr, offsets_ptr, c_ptr, 0, K, N, stride_am, stride_ak, stride_bg, stride_bk,
            stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
        )  # fmt: skip


@triton.jit
def grouped_partial(
    a_ptr,
    b_ptr,
    offsets_ptr,
    parts_ptr,
    row_tiles,
    slice_k,
    part_elements,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bk,
    stride_bn,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """parts[s, rows of g] = A[rows of g, slice s] @ B[g][slice s]: as ``grouped_tiled``, of one slice of K each.

    ``slice_k`` is a multiple of BLOCK_K. Parts are float32, ``part_elements`` elements apart.
    """
    row, column = tile_of(tl.program_id(0), row_tiles, N, 1, BLOCK_N, GROUP_M)
    part = tl.program_id(1)
    ends = tile_ends(offsets_ptr, GROUPS, SLOTS, BLOCK_M)
    if row >= tl.max(ends, 0):
        return
    first_k = part * slice_k
    group_tile(
        row, column, ends, a_ptr, b_ptr, offsets_ptr, parts_ptr + part.to(tl.int64) * part_elements, first_k,
        min(first_k + slice_k, K), N, stride_am, stride_ak, stride_bg, stride_bk, stride_bn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
    )  # fmt: skip
