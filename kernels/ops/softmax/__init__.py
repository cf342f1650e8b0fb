"""softmax: out[row, column] = exp(x[row, column]) / sum of exp(x[row, :])."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.ops.softmax.schema import ELEMENT_FLOPS, SOFTMAX, element_bytes, softmax_tolerance
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation

if TYPE_CHECKING:
    import torch


@register_operation
class Softmax(Operation):
    """The softmax of every row of a matrix. The output has the input's strides, whatever the layout."""

    name = "softmax"
    doc = "exp(x) / sum(exp(x)) over the columns of each row"
    schema = SOFTMAX

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """x [rows, columns], standard normal; a transposed view where the layout is ``column``."""
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)
        shape = (problem["rows"], problem["columns"])
        transposed = problem["layout"] == "column"
        x = torch.randn(shape[::-1] if transposed else shape, generator=generator, dtype=torch.float32)
        x = x.to(dtype=getattr(torch, problem.dtype), device=device)
        return (x.t() if transposed else x,)

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        x = x.double()
        weights = (x - x.amax(1, keepdim=True)).exp()
        return weights / weights.sum(1, keepdim=True)

    def tolerance(self, problem: Problem) -> Tolerance:
        return softmax_tolerance(problem)

    def flops(self, problem: Problem) -> float:
        """5 for each element: maximum, subtraction, exponential, addition, division."""
        return ELEMENT_FLOPS * problem["rows"] * problem["columns"]

    def traffic_bytes(self, problem: Problem) -> float:
        return 2.0 * element_bytes(problem)


# One line a variant.
from kernelcast.kernels.ops.softmax import (  # noqa: E402
    column_chunked,  # noqa: F401
    composed,  # noqa: F401
    exp_log,  # noqa: F401
    matmul_sum,  # noqa: F401
    row_chunked,  # noqa: F401
    triton_row,  # noqa: F401
    triton_rows,  # noqa: F401
    triton_two_pass,  # noqa: F401
    vendor,  # noqa: F401
    vendor_chunked,  # noqa: F401
)
