"""Kernel of ``triton_row``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.layernorm.triton_pieces_jit import apply_vectors, load_float32, store_rounded


@triton.jit
def norm_row(
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
    """One row a program, held in registers. Rows of x and out are contiguous; EVEN says that BLOCK is ``columns``.

    CENTRE subtracts the mean, before anything is squared. Rows are counted in 64 bits, elements of a row in 32.
    """
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = load_float32(x_ptr + start + column, inside, EVEN)
    if CENTRE:
        values = values - tl.sum(values, 0) / columns
        if not EVEN:
            values = tl.where(inside, values, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / columns + EPS)
    values = apply_vectors(values, weight_ptr, bias_ptr, column, inside, EVEN, ALIGNED, HAS_WEIGHT, HAS_BIAS)
    store_rounded(out_ptr + start + column, values, inside, EVEN)
