"""Kernel of ``triton_gemv``, and the parts that other operations share with it. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import load_tile


@triton.jit
def multiply_long(
    few_ptr,
    long_ptr,
    places,
    first,
    end,
    FEW,
    LONG,
    stride_fs,
    stride_fk,
    stride_lk,
    stride_ll,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The few rows times the long matrix at ``places``, over k from ``first`` to ``end``, in float32 [ROWS, BLOCK_N].

    The tile of the long matrix has three dimensions from the start, so that the threads that load its elements, several
    neighbours each, also multiply them: each keeps a sum for every row and for every element that it loads in one turn,
    and the sums over its block of k are added up once, after the loop.
    """
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows = tl.arange(0, ROWS)[:, None, None]
    depth = tl.arange(0, BLOCK_K)[None, :, None]
    across = places[None, None, :]
    from_first = (first + depth).to(offset)
    few_pointers = few_ptr + (rows.to(offset) * stride_fs + from_first * stride_fk)
    long_pointers = long_ptr + (from_first * stride_lk + across.to(offset) * stride_ll)
    step = tl.full((), BLOCK_K, offset)
    sums = tl.zeros((ROWS, BLOCK_K, BLOCK_N), dtype=tl.float32)
    for k in range(first, end, BLOCK_K):
        inside_k = depth < end - k
        few = load_tile(few_pointers, rows < FEW, inside_k, EVEN_ROWS, EVEN_K, True)
        block = load_tile(long_pointers, inside_k, across < LONG, EVEN_K, EVEN_N, True)
        sums += few * block
        few_pointers += step * stride_fk
        long_pointers += step * stride_lk
    return tl.sum(sums, axis=1)


@triton.jit
def store_long(
    pointer,
    tile,
    places,
    FEW,
    LONG,
    stride_s,
    stride_l,
    ROWS: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_N: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the few rows at ``places``, less what lies outside."""
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    rows = tl.arange(0, ROWS)[:, None]
    across = places[None, :]
    pointers = pointer + (rows.to(offset) * stride_s + across.to(offset) * stride_l)
    value = tile.to(pointer.dtype.element_ty)
    if EVEN_ROWS and EVEN_N:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(rows < FEW) & (across < LONG))


@triton.jit
def gemm_gemv(
    few_ptr,
    long_ptr,
    out_ptr,
    FEW,
    LONG,
    K,
    slice_k,
    part_elements,
    stride_fs,
    stride_fk,
    stride_lk,
    stride_ll,
    stride_os,
    stride_ol,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[slice, FEW, LONG] = few[FEW, slice of K] @ long[slice of K, LONG]: a program a block of the long side.

    ``slice_k`` is a multiple of BLOCK_K.
    """
    part = tl.program_id(1)
    places = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * slice_k
    tile = multiply_long(
        few_ptr, long_ptr, places, first, min(first + slice_k, K), FEW, LONG,
        stride_fs, stride_fk, stride_lk, stride_ll, ROWS, BLOCK_N, BLOCK_K, EVEN_ROWS, EVEN_N, EVEN_K, WIDE,
    )  # fmt: skip
    store_long(
        out_ptr + part.to(tl.int64) * part_elements, tile, places, FEW, LONG, stride_os, stride_ol,
        ROWS, EVEN_ROWS, EVEN_N, WIDE,
    )  # fmt: skip
