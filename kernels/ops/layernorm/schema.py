"""What a layernorm problem is made of, and how accurate a right result is."""

from __future__ import annotations

import math

from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.ops.gemm.schema import UNIT_ROUNDOFF
from kernelcast.kernels.ops.layernorm import pieces
from kernelcast.kernels.problem import Dim, Option, Problem, ProblemSchema

LAYERNORM = ProblemSchema(
    operation="layernorm",
    dims=(
        Dim("rows", "rows, each normalised by itself"),
        Dim("columns", "elements of a row", minimum=1),
    ),
    dtypes=pieces.DTYPES,
    options=(
        Option(
            "affine",
            "vectors that the normalised columns are multiplied with and shifted by",
            default="weight_bias",
            choices=("weight_bias", "weight", "none"),
        ),
    ),
)

#: No standard normal number lies beyond: 1e15 of them have one of that size.
LARGEST = 8.0
#: Weights are 1 + 0.1 z and biases 0.1 z of standard normal z, so none is larger.
LARGEST_WEIGHT, LARGEST_BIAS = 1.0 + 0.1 * LARGEST, 0.1 * LARGEST
#: One row in so many may have a smaller variance than :func:`least_variance`.
ROWS_OF_TEST = 1e12


def least_variance(columns: int) -> float:
    """A variance that hardly any row of so many standard normal numbers falls below.

    n times the variance is chi-squared with k = n - 1 degrees of freedom, which lies below y with a probability of at
    most (e y / k)**(k / 2) (Chernoff's bound).
    """
    free = columns - 1
    if free == 0:
        return 0.0
    return free / columns * math.exp(-1.0) * ROWS_OF_TEST ** (-2.0 / free)


def layernorm_tolerance(problem: Problem) -> Tolerance:
    """The tolerance of a layernorm in float32, rounded to the output's dtype.

    Relative: the rounding of the output, with as much again, and the error of the row's scale. Absolute: the mean and the
    differences from it are off by a unit of 2**-24 of the largest element, whatever the dtype, as partial sums of n standard
    normal numbers grow like sqrt(n). The scale amplifies that, above all in short rows, whose elements may lie
    close together; eps is its bound. Of a sum with the bias that is nearly 0, the relative errors of the terms remain.
    """
    scale = pieces.scale_error(problem)
    steepest = 1.0 / math.sqrt(least_variance(problem["columns"]) + pieces.EPSILON["layernorm"])
    centred = LARGEST * UNIT_ROUNDOFF["float32"] * steepest * LARGEST_WEIGHT
    cancelled = scale * LARGEST_BIAS if pieces.has_bias(problem) else 0.0
    return Tolerance(
        relative=2.0 * UNIT_ROUNDOFF[problem.dtype] + scale,
        absolute=centred + cancelled + pieces.smallest_number(problem),
    )
