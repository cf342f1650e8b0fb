"""The kernel of ``triton_persistent``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.batched_gemm.triton_tiled_jit import item_and_tile
from kernelcast.kernels.ops.gemm.triton_tiled_jit import multiply_tile, store_tile, tile_of


@triton.jit
def batched_persistent(
    a_ptr,
    b_ptr,
    c_ptr,
    batch,
    M,
    N,
    K,
    batch_stride_a,
    batch_stride_b,
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
    FLATTEN: tl.constexpr,
):
    """C[i, M, N] = A[i, M, K] @ B[i, K, N]: program p of P makes the tiles p, p + P, ... of all C. C is contiguous.

    FLATTEN makes one loop of the loops over tiles and over k, whose pipeline runs on from tile to tile.
    """
    count = batch * tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for number in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=FLATTEN):
        item, tile_number = item_and_tile(number, M, N, BLOCK_M, BLOCK_N)
        row, column = tile_of(tile_number, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        tile = multiply_tile(
            a_ptr + item * batch_stride_a, b_ptr + item * batch_stride_b, rows, columns, 0, K, M, N,
            stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
        )  # fmt: skip
        store_tile(c_ptr + item * M * N, tile, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
