"""Kernel of ``triton_rows``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_rows(
    x_ptr, out_ptr, rows, columns, stride_row, stride_column, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS whole rows a program, held in registers. x and out share their strides.

    Rows are counted in 64 bits. What lies outside is -inf in rows that there are, and 0 in rows that there are not.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offsets = row[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_column
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x = tl.where((column < columns)[None, :], x, -float("inf"))
    weights = tl.exp(x - tl.max(x, 1)[:, None])
    result = weights / tl.sum(weights, 1)[:, None]
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=inside)
