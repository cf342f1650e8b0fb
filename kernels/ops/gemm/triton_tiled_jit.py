"""Kernels of ``triton_tiled``, and the parts that ``triton_split_k`` shares with them.

Imported at launch alone: everything else of the variant works where triton is absent.
"""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row, column) of a program's tile: GROUP_M rows of tiles at a time, so that neighbours share A and B in L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    within = program % (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + within % height, within // height


@triton.jit
def load_tile(pointers, inside_0, inside_1, EVEN_0: tl.constexpr, EVEN_1: tl.constexpr, WIDEN: tl.constexpr):
    """A tile, zero outside. A dimension that its block divides costs no mask.

    WIDEN casts to float32: the interpreter computes wrong products of bfloat16.
    """
    if EVEN_0 and EVEN_1:
        tile = tl.load(pointers)
    elif EVEN_1:
        tile = tl.load(pointers, mask=inside_0, other=0.0)
    elif EVEN_0:
        tile = tl.load(pointers, mask=inside_1, other=0.0)
    else:
        tile = tl.load(pointers, mask=inside_0 & inside_1, other=0.0)
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def multiply_tile(
    a_ptr,
    b_ptr,
    rows,
    columns,
    first,
    end,
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
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A[rows, first:end] @ B[first:end, columns] in float32. ``first`` is a multiple of BLOCK_K.

    WIDE counts elements in 64 bits, for matrices of 2**31 elements and more.
    """
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    depth = tl.arange(0, BLOCK_K)
    from_first = (first + depth).to(offset)
    a_pointers = a_ptr + (rows[:, None].to(offset) * stride_am + from_first[None, :] * stride_ak)
    b_pointers = b_ptr + (from_first[:, None] * stride_bk + columns[None, :].to(offset) * stride_bn)
    step = tl.full((), BLOCK_K, offset)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first, end, BLOCK_K):
        inside_k = depth < end - k
        a = load_tile(a_pointers, (rows < M)[:, None], inside_k[None, :], EVEN_M, EVEN_K, WIDEN)
        b = load_tile(b_pointers, inside_k[:, None], (columns < N)[None, :], EVEN_K, EVEN_N, WIDEN)
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_pointers += step * stride_ak
        b_pointers += step * stride_bk
    return accumulator


@triton.jit
def store_tile(
    pointer, tile, rows, columns, M, N, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, WIDE: tl.constexpr
):
    """Write a tile of a row-major [M, N] matrix, less what lies outside."""
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    pointers = pointer + (rows[:, None].to(offset) * N + columns[None, :].to(offset))
    value = tile.to(pointer.dtype.element_ty)
    if EVEN_M and EVEN_N:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def gemm_tiled(
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
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """C[M, N] = A[M, K] @ B[K, N]: one program a tile of C, over all of K. C is row-major."""
    row, column = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = multiply_tile(
        a_ptr, b_ptr, rows, columns, 0, K, M, N, stride_am, stride_ak, stride_bk, stride_bn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
    )  # fmt: skip
    store_tile(c_ptr, tile, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
