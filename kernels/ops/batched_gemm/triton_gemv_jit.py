"""Kernel of ``triton_gemv``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_gemv_jit import multiply_long, store_long


@triton.jit
def batched_gemv(
    few_ptr,
    long_ptr,
    out_ptr,
    FEW,
    LONG,
    K,
    slice_k,
    part_elements,
    batch_stride_few,
    batch_stride_long,
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
    """out[slice, i, FEW, LONG] = few[i, FEW, slice of K] @ long[i, slice of K, LONG]: a program a block of a long side.

    ``slice_k`` is a multiple of BLOCK_K.
    """
    blocks = tl.cdiv(LONG, BLOCK_N)
    item = (tl.program_id(0) // blocks).to(tl.int64)
    part = tl.program_id(1)
    places = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * slice_k
    tile = multiply_long(
        few_ptr + item * batch_stride_few, long_ptr + item * batch_stride_long, places, first, min(first + slice_k, K),
        FEW, LONG, stride_fs, stride_fk, stride_lk, stride_ll, ROWS, BLOCK_N, BLOCK_K, EVEN_ROWS, EVEN_N, EVEN_K, WIDE,
    )  # fmt: skip
    target = out_ptr + part.to(tl.int64) * part_elements + item * FEW * LONG
    store_long(target, tile, places, FEW, LONG, stride_os, stride_ol, ROWS, EVEN_ROWS, EVEN_N, WIDE)
