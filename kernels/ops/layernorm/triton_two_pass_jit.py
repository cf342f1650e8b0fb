"""Kernel of ``triton_two_pass``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.layernorm.triton_pieces_jit import apply_vectors, load_float32, store_rounded


@triton.jit
def norm_two_pass(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    columns,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    CENTRE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One row a program, in blocks: its statistics, then the result. EVEN says that BLOCK divides ``columns``.

    Every lane keeps statistics of its own, so that threads meet once a row and not once a block. With CENTRE they are a
    mean and a sum of squared deviations from it, updated element by element, and merged at the end; sums of x and of its
    squares would lose what a large mean and its square share. Rows are counted in 64 bits, elements of a row in 32.
    """
    start = tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    mean_of_row = 0.0
    if CENTRE:
        mean = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + lane
            inside = column < columns
            x = load_float32(x_ptr + start + column, inside, EVEN)
            change = x - mean
            if not EVEN:
                change = tl.where(inside, change, 0.0)
            mean += change * (1.0 / (first // BLOCK + 1))
            squares += change * (x - mean)
        # Each lane has at least one element, as BLOCK is less than columns.
        count = ((columns - 1 - lane) // BLOCK + 1).to(tl.float32)
        mean_of_row = tl.sum(mean * count, 0) / columns
        apart = mean - mean_of_row
        squares += apart * apart * count
    else:
        for first in range(0, columns, BLOCK):
            column = first + lane
            x = load_float32(x_ptr + start + column, column < columns, EVEN)
            squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / columns + EPS)
    for first in range(0, columns, BLOCK):
        column = first + lane
        inside = column < columns
        values = load_float32(x_ptr + start + column, inside, EVEN)
        if CENTRE:
            values = values - mean_of_row
        values = apply_vectors(
            values * scale, weight_ptr, bias_ptr, column, inside, EVEN, ALIGNED, HAS_WEIGHT, HAS_BIAS
        )
        store_rounded(out_ptr + start + column, values, inside, EVEN)
