"""mixed_gemm: C[m, n] = A[m, k] @ (B[k, n] * scale[n]), where B holds 8-bit integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.ops.gemm.schema import operand_dims
from kernelcast.kernels.ops.mixed_gemm.schema import (
    MIXED_GEMM,
    SCALE_RANGE,
    WEIGHT_RANGES,
    WEIGHT_SPREAD,
    mixed_tolerance,
    weight_bytes,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation

if TYPE_CHECKING:
    import torch


@register_operation
class MixedGemm(Operation):
    """Multiplication by a weight that alone is quantised, with one scale for each of its columns.

    The scales lie one after the other: they have no stride in the problem, and kernels read them so.
    """

    name = "mixed_gemm"
    doc = "C[m, n] = A[m, k] @ (B[k, n] * scale[n]), B of 8-bit integers"
    schema = MIXED_GEMM

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """A [m, k] and B [k, n] with the strides that ``layout``, ``lda`` and ``ldb`` give, and scale [n] in A's dtype.

        A is standard normal. B is normal around the middle of its dtype's range, with a standard deviation of 32,
        rounded and clipped; the scales are even between 1/64 and 3/64.
        """
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)
        dtype = getattr(torch, problem.dtype)
        smallest, centre, largest = WEIGHT_RANGES[str(problem["weight_dtype"])]
        matrices: list[torch.Tensor] = []
        for rows, columns, transposed, leading in operand_dims(problem):
            stored = (columns, rows) if transposed else (rows, columns)
            full = torch.randn(stored[0], leading, generator=generator, dtype=torch.float32)
            if matrices:
                full = full.mul_(WEIGHT_SPREAD).add_(centre).round_().clamp_(smallest, largest)
                full = full.to(dtype=getattr(torch, str(problem["weight_dtype"])), device=device)
            else:
                full = full.to(dtype=dtype, device=device)
            matrix = full[:, : stored[1]]
            matrices.append(matrix.t() if transposed else matrix)
        low, high = SCALE_RANGE
        scale = torch.rand(problem["n"], generator=generator, dtype=torch.float32) * (high - low) + low
        return (*matrices, scale.to(dtype=dtype, device=device))

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        a, b, scale = inputs
        return a.double() @ (b.double() * scale.double())

    def tolerance(self, problem: Problem) -> Tolerance:
        return mixed_tolerance(problem)

    def flops(self, problem: Problem) -> float:
        """The products and sums, and one product for each element of C, where the scale can be applied."""
        m, n, k = (float(problem[name]) for name in ("m", "n", "k"))
        return 2.0 * m * n * k + m * n

    def traffic_bytes(self, problem: Problem) -> float:
        m, n, k = (float(problem[name]) for name in ("m", "n", "k"))
        return problem.element_bytes * (m * k + n + m * n) + weight_bytes(problem)


# One line a variant.
import kernelcast.kernels.ops.mixed_gemm.column_chunked  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.float32_product  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.int8pack  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.k_chunked  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.one_pass  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.scaled_output  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.triton_split_k  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.triton_tiled  # noqa: E402
import kernelcast.kernels.ops.mixed_gemm.vendor  # noqa: E402, F401
