"""gemm: C[m, n] = A[m, k] @ B[k, n]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.ops.gemm.schema import GEMM, operand_dims, reduction_tolerance
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation

if TYPE_CHECKING:
    import torch


@register_operation
class Gemm(Operation):
    """Matrix multiplication of two dense matrices."""

    name = "gemm"
    doc = "C[m, n] = A[m, k] @ B[k, n]"
    schema = GEMM

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """A [m, k] and B [k, n], with the strides that ``layout``, ``lda`` and ``ldb`` give."""
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)
        operands = []
        for rows, columns, transposed, leading in operand_dims(problem):
            stored = (columns, rows) if transposed else (rows, columns)
            full = torch.randn(stored[0], leading, generator=generator, dtype=torch.float32)
            full = full.to(dtype=getattr(torch, problem.dtype), device=device)
            matrix = full[:, : stored[1]]
            operands.append(matrix.t() if transposed else matrix)
        return tuple(operands)

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        a, b = inputs
        return a.double() @ b.double()

    def tolerance(self, problem: Problem) -> Tolerance:
        return reduction_tolerance(problem, problem["k"])

    def flops(self, problem: Problem) -> float:
        return 2.0 * problem["m"] * problem["n"] * problem["k"]

    def traffic_bytes(self, problem: Problem) -> float:
        m, n, k = problem["m"], problem["n"], problem["k"]
        return float(problem.element_bytes) * (m * k + k * n + m * n)


# One line a variant.
import kernelcast.kernels.ops.gemm.column_chunked  # noqa: E402
import kernelcast.kernels.ops.gemm.contiguous_operands  # noqa: E402
import kernelcast.kernels.ops.gemm.gemv  # noqa: E402
import kernelcast.kernels.ops.gemm.linear  # noqa: E402
import kernelcast.kernels.ops.gemm.onednn  # noqa: E402
import kernelcast.kernels.ops.gemm.row_chunked  # noqa: E402
import kernelcast.kernels.ops.gemm.split_k  # noqa: E402
import kernelcast.kernels.ops.gemm.transposed  # noqa: E402
import kernelcast.kernels.ops.gemm.triton_descriptor  # noqa: E402
import kernelcast.kernels.ops.gemm.triton_gemv  # noqa: E402
import kernelcast.kernels.ops.gemm.triton_persistent  # noqa: E402
import kernelcast.kernels.ops.gemm.triton_simd  # noqa: E402
import kernelcast.kernels.ops.gemm.triton_split_k  # noqa: E402
import kernelcast.kernels.ops.gemm.triton_stream_k  # noqa: E402
import kernelcast.kernels.ops.gemm.triton_tiled  # noqa: E402
import kernelcast.kernels.ops.gemm.vendor  # noqa: E402, F401
