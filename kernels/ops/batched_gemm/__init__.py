"""batched_gemm: C[i] = A[i] @ B[i], for every i of a batch.

gemm's ``triton_stream_k`` has no counterpart: the more tiles a batch has, the less a last, partly filled round counts, and
where its tiles are fewer than the cores, ``triton_split_k`` divides k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.ops.batched_gemm.schema import BATCHED_GEMM, copies, output_elements
from kernelcast.kernels.ops.gemm.schema import operand_dims, reduction_tolerance
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation

if TYPE_CHECKING:
    import torch


@register_operation
class BatchedGemm(Operation):
    """Products of a batch of matrices of one shape; one operand may be the same matrix for the whole batch.

    A is [batch, m, k], B [batch, k, n], the output [batch, m, n] and contiguous.
    """

    name = "batched_gemm"
    doc = "C[i, m, n] = A[i, m, k] @ B[i, k, n]"
    schema = BATCHED_GEMM

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """A and B with the strides that ``layout``, ``lda``, ``ldb`` and ``broadcast`` give."""
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)
        found = []
        for count, (rows, columns, transposed, leading) in zip(
            copies(problem), operand_dims(problem), strict=True
        ):
            stored = (columns, rows) if transposed else (rows, columns)
            full = torch.randn(count, stored[0], leading, generator=generator, dtype=torch.float32)
            full = full.to(dtype=getattr(torch, problem.dtype), device=device)
            matrices = full[:, :, : stored[1]]
            if count != problem["batch"]:
                matrices = matrices.expand(problem["batch"], *stored)
            found.append(matrices.transpose(1, 2) if transposed else matrices)
        return tuple(found)

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        a, b = inputs
        return a.double() @ b.double()

    def tolerance(self, problem: Problem) -> Tolerance:
        return reduction_tolerance(problem, problem["k"])

    def flops(self, problem: Problem) -> float:
        return 2.0 * output_elements(problem) * problem["k"]

    def traffic_bytes(self, problem: Problem) -> float:
        """A broadcast operand is read once."""
        of_a, of_b = copies(problem)
        m, n, k = problem["m"], problem["n"], problem["k"]
        return float(problem.element_bytes) * (of_a * m * k + of_b * k * n + output_elements(problem))


# One line a variant.
from kernelcast.kernels.ops.batched_gemm import (  # noqa: E402
    chunked,  # noqa: F401
    folded,  # noqa: F401
    per_item,  # noqa: F401
    split_k,  # noqa: F401
    triton_descriptor,  # noqa: F401
    triton_gemv,  # noqa: F401
    triton_persistent,  # noqa: F401
    triton_simd,  # noqa: F401
    triton_split_k,  # noqa: F401
    triton_tiled,  # noqa: F401
    vendor,  # noqa: F401
)
