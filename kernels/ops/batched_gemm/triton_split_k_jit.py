"""Kernel of ``triton_split_k``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.batched_gemm.triton_tiled_jit import item_and_tile
from kernelcast.kernels.ops.gemm.triton_tiled_jit import multiply_tile, store_tile, tile_of


@triton.jit
def batched_partial(
    a_ptr,
    b_ptr,
    parts_ptr,
    M,
    N,
    K,
    batch_stride_a,
    batch_stride_b,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    slice_k,
    part_elements,
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
    """parts[s, i, M, N] = A[i, :, slice s] @ B[i, slice s, :]: one program a tile of one part. Parts are contiguous.

    ``slice_k`` is a multiple of BLOCK_K. A slice that begins beyond K writes zeros.
    """
    item, tile_number = item_and_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    row, column = tile_of(tile_number, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    part = tl.program_id(1)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * slice_k
    tile = multiply_tile(
        a_ptr + item * batch_stride_a, b_ptr + item * batch_stride_b, rows, columns, first, min(first + slice_k, K),
        M, N, stride_am, stride_ak, stride_bk, stride_bn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
    )  # fmt: skip
    target = parts_ptr + part.to(tl.int64) * part_elements + item * M * N
    store_tile(target, tile, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
