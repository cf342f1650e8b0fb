"""The kernel of ``triton_persistent``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import multiply_tile, store_tile, tile_of


@triton.jit
def gemm_persistent(
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
    FLATTEN: tl.constexpr,
):
    """C[M, N] = A[M, K] @ B[K, N]: program p of P makes the tiles p, p + P, p + 2 P, ... C is row-major.

    FLATTEN makes one loop of the loops over tiles and over k, whose pipeline runs on from tile to tile.
    """
    tile_count = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        product = multiply_tile(
            a_ptr, b_ptr, rows, columns, 0, K, M, N, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
        )  # fmt: skip
        store_tile(c_ptr, product, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
