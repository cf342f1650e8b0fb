"""What an rmsnorm problem is made of, and how accurate a right result is."""

from __future__ import annotations

from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.ops.gemm.schema import UNIT_ROUNDOFF
from kernelcast.kernels.ops.layernorm import pieces
from kernelcast.kernels.problem import Dim, Option, Problem, ProblemSchema

RMSNORM = ProblemSchema(
    operation="rmsnorm",
    dims=(
        Dim("rows", "rows, each normalised by itself"),
        Dim("columns", "elements of a row", minimum=1),
    ),
    dtypes=pieces.DTYPES,
    options=(
        Option(
            "affine",
            "vector that the normalised columns are multiplied with",
            default="weight",
            choices=("weight", "none"),
        ),
    ),
)


def rmsnorm_tolerance(problem: Problem) -> Tolerance:
    """The tolerance of an rmsnorm in float32, rounded to the output's dtype.

    Nothing is subtracted, so every error is relative: that of the row's scale, and roundings to the output's dtype. Those
    are one unit, and with a weight two and that of their product, as torch's own rms_norm rounds the normalised row
    before it multiplies in some of its versions.
    """
    roundings = 3.0 if pieces.has_weight(problem) else 2.0
    return Tolerance(
        relative=roundings * UNIT_ROUNDOFF[problem.dtype] + pieces.scale_error(problem),
        absolute=pieces.smallest_number(problem),
    )
