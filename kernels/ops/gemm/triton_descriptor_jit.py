"""The kernel of ``triton_descriptor``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import store_tile, tile_of


@triton.jit
def describe(
    pointer,
    rows,
    columns,
    leading,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """A descriptor of a matrix as it is stored: the columns of a transposed one are its rows."""
    if TRANSPOSED:
        described = tl.make_tensor_descriptor(
            pointer, shape=[columns, rows], strides=[leading, 1], block_shape=[BLOCK_COLUMNS, BLOCK_ROWS]
        )
    else:
        described = tl.make_tensor_descriptor(
            pointer, shape=[rows, columns], strides=[leading, 1], block_shape=[BLOCK_ROWS, BLOCK_COLUMNS]
        )
    return described


@triton.jit
def fetch(described, row, column, TRANSPOSED: tl.constexpr, WIDEN: tl.constexpr):
    """The tile whose first element is (row, column), zero outside the matrix. WIDEN as in ``load_tile``."""
    if TRANSPOSED:
        tile = described.load([column, row]).T
    else:
        tile = described.load([row, column])
    if WIDEN:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def gemm_descriptor(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    leading_a,
    leading_b,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
    TRANSPOSED_A: tl.constexpr,
    TRANSPOSED_B: tl.constexpr,
    DESCRIBED_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """C[M, N] = A[M, K] @ B[K, N]: program p of P makes the tiles p, p + P, p + 2 P, ... C is row-major.

    A descriptor is built once a program and serves all of its tiles. DESCRIBED_STORE stores through one too.
    """
    a = describe(a_ptr, M, K, leading_a, BLOCK_M, BLOCK_K, TRANSPOSED_A)
    b = describe(b_ptr, K, N, leading_b, BLOCK_K, BLOCK_N, TRANSPOSED_B)
    if DESCRIBED_STORE:
        c = describe(c_ptr, M, N, N, BLOCK_M, BLOCK_N, False)
    tile_count = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_tile = fetch(a, row * BLOCK_M, k, TRANSPOSED_A, WIDEN)
            b_tile = fetch(b, k, column * BLOCK_N, TRANSPOSED_B, WIDEN)
            accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=PRECISION)
        if DESCRIBED_STORE:
            c.store([row * BLOCK_M, column * BLOCK_N], accumulator.to(c_ptr.dtype.element_ty))
        else:
            rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
            store_tile(c_ptr, accumulator, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
