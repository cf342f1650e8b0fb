"""What a gemm problem is made of, and helpers that its variants share."""

from __future__ import annotations

import math
from dataclasses import replace

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.problem import Dim, Option, OptionValue, Problem, ProblemSchema

LAYOUTS = ("nn", "nt", "tn", "tt")


class GemmSchema(ProblemSchema):
    """The schema of gemm: leading dimensions must hold a row, and one memory layout is one problem."""

    __slots__ = ()

    def problem(
        self, *, dtype: str = "float32", allow_tf32: bool = False, threads: int = 0, **values: OptionValue
    ) -> Problem:
        """As :meth:`ProblemSchema.problem`; an ``lda`` or ``ldb`` that only says "adjacent" becomes 0.

        Raises:
            InvalidProblemError: also where a leading dimension is smaller than the row that it must hold.
        """
        built = super().problem(dtype=dtype, allow_tf32=allow_tf32, threads=threads, **values)
        canonical = dict(built.options)
        sizes = (("lda", built["m"], built["k"]), ("ldb", built["k"], built["n"]))
        for (name, rows, columns), letter in zip(sizes, str(built["layout"]), strict=True):
            stored, adjacent = (columns, rows) if letter == "t" else (rows, columns)
            if 0 < built[name] < adjacent:
                raise InvalidProblemError(
                    f"{self.operation}: {name} is {built[name]}, but {adjacent} elements lie between the starts of two rows at "
                    f"least (layout {built['layout']}). Leave {name} out where rows are adjacent."
                )
            # Where the rows touch, or there is only one, every value of it describes the same memory.
            if built[name] == adjacent or stored <= 1:
                canonical[name] = 0
        options = tuple(canonical.items())
        return built if options == built.options else replace(built, options=options)


GEMM = GemmSchema(
    operation="gemm",
    dims=(
        Dim("m", "rows of A and C"),
        Dim("n", "columns of B and C"),
        Dim("k", "columns of A, rows of B"),
    ),
    dtypes=("float32", "float16", "bfloat16"),
    options=(
        Option(
            "layout",
            "of A and B: n is row-major, t is column-major (a transposed view)",
            default="nn",
            choices=LAYOUTS,
        ),
        Option("lda", "elements between A's rows (columns, if t); 0 where they are adjacent", default=0),
        Option("ldb", "elements between B's rows (columns, if t); 0 where they are adjacent", default=0),
    ),
)

#: Unit roundoff of each dtype: half the distance from 1 to the next number.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}


def matrix_layout(rows: int, columns: int, stride_0: int, stride_1: int) -> tuple[str, int] | None:
    """A strided matrix as gemm problems state it: ``"n"`` or ``"t"``, and its leading dimension, 0 where adjacent.

    Strides that are exactly row-major are ``n``, exactly column-major ``t``, in this order, so that a matrix of one
    row or one column keeps the letter that its strides give. Otherwise the stride of a dimension of size 1 means
    nothing, and is left out.

    Args:
        rows: size of the first dimension.
        columns: size of the second.
        stride_0: elements from one row to the next.
        stride_1: elements from one column to the next.

    Returns:
        None where neither the rows nor the columns are one after the other, or they overlap.
    """
    if (stride_0, stride_1) == (columns, 1):
        return "n", 0
    if (stride_0, stride_1) == (1, rows):
        return "t", 0
    if (stride_1 == 1 or columns == 1) and (stride_0 >= columns or rows == 1):
        return "n", 0 if rows == 1 or stride_0 == columns else stride_0
    if (stride_0 == 1 or rows == 1) and (stride_1 >= rows or columns == 1):
        return "t", 0 if columns == 1 or stride_1 == rows else stride_1
    return None


def operand_dims(problem: Problem) -> list[tuple[int, int, bool, int]]:
    """(rows, columns, transposed, leading dimension in elements) of A and of B."""
    layout = problem["layout"]
    operands = []
    for rows, columns, letter, name in (
        (problem["m"], problem["k"], layout[0], "lda"),
        (problem["k"], problem["n"], layout[1], "ldb"),
    ):
        transposed = letter == "t"
        adjacent = rows if transposed else columns
        operands.append((rows, columns, transposed, max(problem[name], adjacent)))
    return operands


def reduction_tolerance(problem: Problem, length: int) -> Tolerance:
    """The tolerance of a sum of ``length`` products of standard normal numbers, accumulated in float32.

    Rounding errors of a sum of n terms grow like sqrt(n) times the unit roundoff times the sum of absolute terms
    (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019), and the
    absolute terms sum to about 0.64 n; terms of both signs keep the partial sums near sqrt(n), which leaves sqrt(n)
    times sqrt(n). The factor covers the largest of many elements and orders of summation. 16-bit inputs are exact in
    float32; their output is rounded once, which the relative part covers.
    """
    accumulate = UNIT_ROUNDOFF["tf32"] if problem.allow_tf32 else UNIT_ROUNDOFF["float32"]
    stored = UNIT_ROUNDOFF[problem.dtype]
    # TF32 rounds the inputs, not the sums: n independent errors of one size.
    growth = math.sqrt(length) if problem.allow_tf32 else float(length)
    # 16-bit libraries may keep split sums in the output's dtype: a few roundings of numbers of size sqrt(n).
    split = 8.0 * stored * math.sqrt(length) if problem.element_bytes == 2 else 0.0
    return Tolerance(relative=4.0 * stored, absolute=8.0 * accumulate * growth + split + 1e-30)
