"""layernorm: out[row, :] = (x[row, :] - mean) / sqrt(variance + eps) * weight + bias, with the statistics of each row."""

from __future__ import annotations

from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.ops.layernorm.pieces import RowNorm
from kernelcast.kernels.ops.layernorm.schema import LAYERNORM, layernorm_tolerance
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation


@register_operation
class LayerNorm(RowNorm):
    """Layer normalisation over the last dimension of a contiguous matrix [rows, columns].

    The variance is that of the row, divided by n. Launchers take ``eps`` as a keyword; it is 1e-5 where none is named, as
    in torch and in :meth:`reference`.
    """

    name = "layernorm"
    doc = "(x - mean) / sqrt(variance + eps) * weight + bias over the columns of each row"
    schema = LAYERNORM

    def tolerance(self, problem: Problem) -> Tolerance:
        return layernorm_tolerance(problem)


# One line a variant.
from kernelcast.kernels.ops.layernorm import (  # noqa: E402
    composed,  # noqa: F401
    row_chunked,  # noqa: F401
    triton_row,  # noqa: F401
    triton_rows,  # noqa: F401
    triton_two_pass,  # noqa: F401
    vendor,  # noqa: F401
)
