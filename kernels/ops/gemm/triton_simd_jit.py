"""Kernel of ``triton_simd``, and the part that other operations share with it. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import load_tile, tile_of


@triton.jit
def multiply_outer(
    a_ptr,
    b_ptr,
    rows,
    columns,
    K,
    M,
    N,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A[rows, :] @ B[:, columns] in float32, one outer product a step of k, BLOCK_K of them in one turn of the loop.

    Every thread loads the elements that it multiplies straight from the cache; nothing crosses shared memory. For that
    addresses are computed anew in each step, as a loop that carried them would fix who loads them, and the hint keeps
    threads from loading neighbours that others multiply.
    """
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    a_rows = rows[:, None].to(offset) * stride_am
    b_columns = columns[None, :].to(offset) * stride_bn
    origin = tl.zeros((1, 1), dtype=tl.int32)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        for step in tl.static_range(BLOCK_K):
            k = origin + (first + step)
            inside_k = k < K
            a_pointers = tl.max_contiguous(a_ptr + (a_rows + k.to(offset) * stride_ak), (1, 1))
            b_pointers = tl.max_contiguous(b_ptr + (b_columns + k.to(offset) * stride_bk), (1, 1))
            a = load_tile(a_pointers, (rows < M)[:, None], inside_k, EVEN_M, EVEN_K, True)
            b = load_tile(b_pointers, inside_k, (columns < N)[None, :], EVEN_K, EVEN_N, True)
            accumulator += a * b
    return accumulator


@triton.jit
def store_as_held(
    pointer, tile, rows, columns, M, N, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr
):
    """Write a tile of a row-major [M, N] matrix, less what lies outside, each thread what it holds.

    Neighbouring threads hold neighbouring columns, so their stores fill whole rows already. Without the hint the tile
    would cross shared memory, for each thread to store several neighbours at once.
    """
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    pointers = pointer + (rows[:, None].to(offset) * N + columns[None, :].to(offset))
    pointers = tl.max_contiguous(pointers, (1, 1))
    value = tile.to(pointer.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def gemm_simd(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """C[M, N] = A[M, K] @ B[K, N]: one program a tile of C, over all of K. C is row-major."""
    row, column = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = multiply_outer(
        a_ptr, b_ptr, rows, columns, K, M, N, stride_am, stride_ak, stride_bk, stride_bn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, WIDE,
    )  # fmt: skip
    store_as_held(c_ptr, tile, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
