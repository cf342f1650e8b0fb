"""Kernels of ``triton_split_k``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import store_tile, tile_of
from kernelcast.kernels.ops.mixed_gemm.triton_tiled_jit import multiply_mixed_tile


@triton.jit
def mixed_gemm_partial(
    a_ptr,
    b_ptr,
    parts_ptr,
    M,
    N,
    K,
    slice_k,
    part_elements,
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
    BITS: tl.constexpr,
):
    """parts[s, M, N] = A[:, slice s] @ B[slice s, :], unscaled: one program a tile of one part, row-major float32.

    ``slice_k`` is a multiple of BLOCK_K. A slice that begins beyond K writes zeros.
    """
    row, column = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    part = tl.program_id(1)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * slice_k
    tile = multiply_mixed_tile(
        a_ptr, b_ptr, rows, columns, first, min(first + slice_k, K), M, N, stride_am, stride_ak, stride_bk, stride_bn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN, BITS,
    )  # fmt: skip
    store_tile(parts_ptr + part.to(tl.int64) * part_elements, tile, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)


@triton.jit
def sum_and_scale(parts_ptr, scale_ptr, c_ptr, N, part_elements, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """c = the sum of SPLIT parts of ``part_elements`` elements, in a fixed order, times the scale of each column."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < part_elements
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(
            parts_ptr + tl.full((), part, tl.int64) * part_elements + elements, mask=inside, other=0.0
        )
    scale = tl.load(scale_ptr + elements % N, mask=inside, other=0.0)
    total *= scale.to(tl.float32)
    tl.store(c_ptr + elements, total.to(c_ptr.dtype.element_ty), mask=inside)
