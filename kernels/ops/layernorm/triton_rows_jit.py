"""Kernel of ``triton_rows``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.layernorm.triton_pieces_jit import apply_vectors, load_float32, store_rounded


@triton.jit
def norm_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    CENTRE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """ROWS whole rows a program, held in registers.

    EVEN_ROWS says that ROWS divides ``rows``, EVEN that BLOCK is ``columns``. Rows are counted in 64 bits. Rows that there
    are not hold zeros, which are scaled and not written.
    """
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    offsets = row * columns + column
    existing = column < columns
    inside = (row < rows) & existing
    values = load_float32(x_ptr + offsets, inside, EVEN_ROWS and EVEN)
    if CENTRE:
        values = values - (tl.sum(values, 1) / columns)[:, None]
        if not EVEN:
            values = tl.where(existing, values, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 1) / columns + EPS)[:, None]
    # Of the tile's shape and masked as it is, the vectors are read as the tile is, and need not be rearranged.
    column = tl.broadcast_to(column, (ROWS, BLOCK))
    values = apply_vectors(
        values, weight_ptr, bias_ptr, column, inside, False, ALIGNED, HAS_WEIGHT, HAS_BIAS
    )  # fmt: skip
    store_rounded(out_ptr + offsets, values, inside, EVEN_ROWS and EVEN)
