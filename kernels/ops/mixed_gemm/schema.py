"""What a mixed_gemm problem is made of, the distribution of its inputs, and the tolerance that follows from it."""

from __future__ import annotations

import math

from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.ops.gemm.schema import GEMM, UNIT_ROUNDOFF, GemmSchema
from kernelcast.kernels.problem import DTYPE_BYTES, Option, Problem

#: The dtypes of B, with (smallest, centre, largest) of the values that are drawn: rounded normal numbers, clipped.
WEIGHT_RANGES = {"int8": (-127, 0, 127), "uint8": (0, 128, 255)}
#: Standard deviation of the drawn weights.
WEIGHT_SPREAD = 32.0
#: Scales are drawn evenly from this range, so that scaled int8 weights are about as large as normal numbers.
SCALE_RANGE = (0.5 / WEIGHT_SPREAD, 1.5 / WEIGHT_SPREAD)

MIXED_GEMM = GemmSchema(
    operation="mixed_gemm",
    dims=GEMM.dims,
    dtypes=GEMM.dtypes,
    options=(
        Option("weight_dtype", "of B", default="int8", choices=tuple(WEIGHT_RANGES)),
        *GEMM.options,
    ),
)


def weight_bytes(problem: Problem) -> float:
    """Bytes of B as it is stored."""
    return float(DTYPE_BYTES[str(problem["weight_dtype"])]) * problem["k"] * problem["n"]


def cast_weight_bytes(problem: Problem) -> float:
    """Bytes of B in A's dtype."""
    return float(problem.element_bytes) * problem["k"] * problem["n"]


def largest_weight_size(problem: Problem) -> float:
    """Root mean square of the scaled weights in the column of the largest scale."""
    _, centre, _ = WEIGHT_RANGES[str(problem["weight_dtype"])]
    return SCALE_RANGE[1] * math.hypot(WEIGHT_SPREAD, centre)


def mixed_tolerance(problem: Problem) -> Tolerance:
    """The tolerance of a sum of k products of standard normal numbers and scaled weights, accumulated in float32.

    As gemm's (see :func:`kernelcast.kernels.ops.gemm.schema.reduction_tolerance`), times the size w of the scaled
    weights in the column where they are largest. Where the weights are scaled before they are multiplied, each of them
    is rounded once to A's dtype: k independent errors of up to u * w, of one sign or the other, add up to less than
    u * w * sqrt(k) on average, and to four times that in the worst of many elements. Where the columns of C are scaled
    afterwards, C is rounded twice, which the relative part covers.
    """
    size = largest_weight_size(problem)
    length = float(problem["k"])
    accumulate = UNIT_ROUNDOFF["tf32"] if problem.allow_tf32 else UNIT_ROUNDOFF["float32"]
    stored = UNIT_ROUNDOFF[problem.dtype]
    growth = math.sqrt(length) if problem.allow_tf32 else length
    # Four for the rounded weights. Eight, as in gemm, for libraries that keep split sums in a 16-bit output's dtype.
    rounded = (12.0 if problem.element_bytes == 2 else 4.0) * stored * math.sqrt(length)
    return Tolerance(relative=4.0 * stored, absolute=size * (8.0 * accumulate * growth + rounded) + 1e-30)
