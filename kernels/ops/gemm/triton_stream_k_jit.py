"""Kernels of ``triton_stream_k``. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import multiply_tile, store_tile, tile_of


@triton.jit
def shares(M, N, K, programs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(rounds of whole tiles, tiles left over, steps of a tile, steps of a program's share of those left over).

    The last two count in 64 bits, as their products may pass 2**31. An empty sum is one step of zeros.
    """
    tile_count = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    rounds = tile_count // programs
    left = tile_count - rounds * programs
    steps = tl.maximum(tl.zeros((), tl.int64) + tl.cdiv(K, BLOCK_K), 1)
    return rounds, left, steps, tl.cdiv(left * steps, programs)


@triton.jit
def gemm_stream_k(
    a_ptr,
    b_ptr,
    c_ptr,
    parts_ptr,
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
    """C = A @ B but for the tiles left over, whose parts go to ``parts`` [slot, BLOCK_M, BLOCK_N].

    A program first makes its whole tiles, then the parts in its share. From one part to the next, the program or the
    tile or both go up by one: program + tile is a slot that no other part has.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    rounds, left, steps, share = shares(M, N, K, programs, BLOCK_M, BLOCK_N, BLOCK_K)
    begin = min(program * share, left * steps)
    finish = min(begin + share, left * steps)
    first_left = begin // steps
    pieces = rounds + (tl.cdiv(finish, steps) - first_left) * (begin < finish)
    for piece in range(0, pieces.to(tl.int32)):
        shared = piece >= rounds
        of_left = first_left + (piece - rounds)
        tile = tl.where(shared, rounds * programs + of_left, program + piece * programs).to(tl.int32)
        first = tl.where(shared, max(begin - of_left * steps, 0), 0).to(tl.int32)
        end = tl.where(shared, min(finish - of_left * steps, steps), steps).to(tl.int32)
        row, column = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        product = multiply_tile(
            a_ptr, b_ptr, rows, columns, first * BLOCK_K, min(end * BLOCK_K, K), M, N,
            stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN,
        )  # fmt: skip
        if shared:
            part = parts_ptr + (program + of_left) * (BLOCK_M * BLOCK_N)
            within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(part + within, product)
        else:
            store_tile(c_ptr, product, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)


@triton.jit
def sum_shared_tiles(
    parts_ptr,
    c_ptr,
    M,
    N,
    K,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    WIDE: tl.constexpr,
    SUM_M: tl.constexpr,
):
    """The tiles left over: the sum of each one's parts in the order of k, SUM_M rows of a tile a program."""
    rounds, _, steps, share = shares(M, N, K, programs, BLOCK_M, BLOCK_N, BLOCK_K)
    of_left = tl.program_id(0).to(tl.int64)
    inside = tl.program_id(1) * SUM_M + tl.arange(0, SUM_M)
    within = inside[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    first = of_left * steps // share
    last = ((of_left + 1) * steps - 1) // share
    total = tl.zeros((SUM_M, BLOCK_N), dtype=tl.float32)
    for program in range(first, last + 1):
        total += tl.load(parts_ptr + (program + of_left) * (BLOCK_M * BLOCK_N) + within)
    tile = (rounds * programs + of_left).to(tl.int32)
    row, column = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    store_tile(c_ptr, total, row * BLOCK_M + inside, columns, M, N, EVEN_M, EVEN_N, WIDE)
