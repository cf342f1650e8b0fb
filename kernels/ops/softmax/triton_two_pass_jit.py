"""Kernel of ``triton_two_pass``. Imported at launch alone: everything else of the variant works where triton is absent."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_two_pass(x_ptr, out_ptr, columns, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """One row a program, in blocks: the online maximum and sum, then the result. EVEN: BLOCK divides ``columns``.

    Every lane keeps a maximum and a sum of its own, so that threads meet once a row and not once a block. Rows are
    counted in 64 bits, elements of a row in 32. A row of -inf alone becomes NaN, as in torch.
    """
    start = tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + lane
        if EVEN:
            x = tl.load(x_ptr + start + column).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, x)
        # A lane that saw nothing but -inf so far would subtract it from itself.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(peak - shift) + tl.exp(x - shift)
        peak = higher
    highest = tl.max(peak, 0)
    sum_of_row = tl.sum(total * tl.exp(peak - highest), 0)
    for first in range(0, columns, BLOCK):
        column = first + lane
        if EVEN:
            x = tl.load(x_ptr + start + column).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        result = (tl.exp(x - highest) / sum_of_row).to(out_ptr.dtype.element_ty)
        if EVEN:
            tl.store(out_ptr + start + column, result)
        else:
            tl.store(out_ptr + start + column, result, mask=column < columns)
