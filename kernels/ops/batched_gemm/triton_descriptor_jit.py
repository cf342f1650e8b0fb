"""The kernel of ``triton_descriptor``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.batched_gemm.triton_tiled_jit import item_and_tile
from kernelcast.kernels.ops.gemm.triton_descriptor_jit import describe, fetch
from kernelcast.kernels.ops.gemm.triton_tiled_jit import store_tile, tile_of


@triton.jit
def describe_all(
    pointer,
    batch,
    rows,
    columns,
    batch_stride,
    leading,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SHARED: tl.constexpr,
):
    """A descriptor of all matrices of a batch as they are stored, or of the one (SHARED) that all products read."""
    if SHARED:
        described = describe(pointer, rows, columns, leading, BLOCK_ROWS, BLOCK_COLUMNS, TRANSPOSED)
    elif TRANSPOSED:
        described = tl.make_tensor_descriptor(
            pointer,
            shape=[batch, columns, rows],
            strides=[batch_stride, leading, 1],
            block_shape=[1, BLOCK_COLUMNS, BLOCK_ROWS],
        )
    else:
        described = tl.make_tensor_descriptor(
            pointer,
            shape=[batch, rows, columns],
            strides=[batch_stride, leading, 1],
            block_shape=[1, BLOCK_ROWS, BLOCK_COLUMNS],
        )
    return described


@triton.jit
def fetch_of(
    described,
    item,
    row,
    column,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SHARED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """The tile of one matrix whose first element is (row, column), zero outside the matrix. WIDEN as in ``load_tile``."""
    if SHARED:
        tile = fetch(described, row, column, TRANSPOSED, WIDEN)
    else:
        if TRANSPOSED:
            tile = described.load([item, column, row]).reshape(BLOCK_COLUMNS, BLOCK_ROWS).T
        else:
            tile = described.load([item, row, column]).reshape(BLOCK_ROWS, BLOCK_COLUMNS)
        if WIDEN:
            tile = tile.to(tl.float32)
    return tile


@triton.jit
def batched_descriptor(
    a_ptr,
    b_ptr,
    c_ptr,
    batch,
    M,
    N,
    K,
    batch_stride_a,
    batch_stride_b,
    batch_stride_c,
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
    SHARED_A: tl.constexpr,
    SHARED_B: tl.constexpr,
    DESCRIBED_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """C[i, M, N] = A[i, M, K] @ B[i, K, N]: program p of P makes the tiles p, p + P, ... of all C. C is contiguous.

    A descriptor is built once a program and serves all of its tiles. The product is a dimension of it, so a box ends with
    its matrix: what lies below is zero when read, and is not written. DESCRIBED_STORE stores through one too.
    """
    a = describe_all(a_ptr, batch, M, K, batch_stride_a, leading_a, BLOCK_M, BLOCK_K, TRANSPOSED_A, SHARED_A)
    b = describe_all(b_ptr, batch, K, N, batch_stride_b, leading_b, BLOCK_K, BLOCK_N, TRANSPOSED_B, SHARED_B)
    if DESCRIBED_STORE:
        c = describe_all(c_ptr, batch, M, N, batch_stride_c, N, BLOCK_M, BLOCK_N, False, False)
    count = batch * tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for number in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=FLATTEN):
        item, tile_number = item_and_tile(number, M, N, BLOCK_M, BLOCK_N)
        coordinate = item.to(tl.int32)
        row, column = tile_of(tile_number, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a_tile = fetch_of(
                a, coordinate, row * BLOCK_M, k, BLOCK_M, BLOCK_K, TRANSPOSED_A, SHARED_A, WIDEN
            )
            b_tile = fetch_of(
                b, coordinate, k, column * BLOCK_N, BLOCK_K, BLOCK_N, TRANSPOSED_B, SHARED_B, WIDEN
            )
            accumulator = tl.dot(a_tile, b_tile, accumulator, input_precision=PRECISION)
        if DESCRIBED_STORE:
            stored = accumulator.to(c_ptr.dtype.element_ty).reshape(1, BLOCK_M, BLOCK_N)
            c.store([coordinate, row * BLOCK_M, column * BLOCK_N], stored)
        else:
            rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
            store_tile(c_ptr + item * M * N, accumulator, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
