"""Device functions that the Triton norms share. Imported at launch alone, with the kernels that call them."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_float32(pointers, inside, EVEN: tl.constexpr):
    """Elements as float32, zero outside. EVEN says that all are inside, which spares the mask."""
    if EVEN:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rounded(pointers, values, inside, EVEN: tl.constexpr):
    """Write what is inside, rounded to the dtype of the pointers."""
    rounded = values.to(pointers.dtype.element_ty)
    if EVEN:
        tl.store(pointers, rounded)
    else:
        tl.store(pointers, rounded, mask=inside)


@triton.jit
def apply_vectors(
    values,
    weight_ptr,
    bias_ptr,
    column,
    inside,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiply with the weight of each column and add its bias, where there are any.

    ALIGNED says that rows start at multiples of 16 elements. Others are read one element at a time, and so must the
    vectors be, or every one of them would be rearranged through shared memory. The grid has one dimension, so what is
    added to the column is 0, which the compiler cannot know.
    """
    if not ALIGNED:
        column = column + tl.program_id(1)
    if HAS_WEIGHT:
        values = values * load_float32(weight_ptr + column, inside, EVEN)
    if HAS_BIAS:
        values = values + load_float32(bias_ptr + column, inside, EVEN)
    return values
