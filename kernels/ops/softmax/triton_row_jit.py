"""Kernel of ``triton_row``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_row(x_ptr, out_ptr, columns, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """One row a program, held in registers. Rows of x and out are contiguous; EVEN says that BLOCK is ``columns``.

    Rows are counted in 64 bits, elements of a row in 32. A row of -inf alone becomes NaN, as in torch.
    """
    start = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    if EVEN:
        x = tl.load(x_ptr + start + column).to(tl.float32)
    else:
        x = tl.load(x_ptr + start + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, 0))
    result = (weights / tl.sum(weights, 0)).to(out_ptr.dtype.element_ty)
    if EVEN:
        tl.store(out_ptr + start + column, result)
    else:
        tl.store(out_ptr + start + column, result, mask=column < columns)
