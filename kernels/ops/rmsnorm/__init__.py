"""rmsnorm: out[row, :] = x[row, :] / sqrt(mean of x[row, :]^2 + eps) * weight, with the mean of each row."""

from __future__ import annotations

from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.ops.layernorm.pieces import RowNorm
from kernelcast.kernels.ops.rmsnorm.schema import RMSNORM, rmsnorm_tolerance
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation


@register_operation
class RmsNorm(RowNorm):
    """Root-mean-square normalisation over the last dimension of a contiguous matrix [rows, columns].

    Launchers take ``eps`` as a keyword; it is 1e-6 where none is named, as in :meth:`reference`.
    """

    name = "rmsnorm"
    doc = "x / sqrt(mean(x^2) + eps) * weight over the columns of each row"
    schema = RMSNORM

    def tolerance(self, problem: Problem) -> Tolerance:
        return rmsnorm_tolerance(problem)


# One line a variant.
from kernelcast.kernels.ops.rmsnorm import (  # noqa: E402
    composed,  # noqa: F401
    row_chunked,  # noqa: F401
    triton_row,  # noqa: F401
    triton_rows,  # noqa: F401
    triton_two_pass,  # noqa: F401
    vendor,  # noqa: F401
)
