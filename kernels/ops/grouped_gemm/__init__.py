"""grouped_gemm: each group of rows of A times its own matrix of B, as in a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.ops.gemm.schema import reduction_tolerance
from kernelcast.kernels.ops.grouped_gemm.schema import GROUPED_GEMM, draw_ends, expected_busy_groups
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation

if TYPE_CHECKING:
    import torch

#: Weights that are drawn one by one.
MOST_DRAWN = 2**26


@register_operation
class GroupedGemm(Operation):
    """Rows of A, sorted by group, times the matrix of their group.

    The inputs are A [m, k], B [groups, k, n] and ``offsets`` (int32 [groups], on the device of A): the end row of each
    group, not decreasing, the last equal to m, as ``torch.nn.functional.grouped_mm`` takes them. A group may be empty.
    """

    name = "grouped_gemm"
    doc = "C[rows of g] = A[rows of g] @ B[g]: A [m, k] sorted by group, B [groups, k, n]"
    schema = GROUPED_GEMM

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """A, B in the problem's layout, and offsets drawn from its distribution by the seed.

        Of more than 2**26 weights one matrix is drawn, and each group has its rows in another order, moved round by the
        group's number: drawing gigabytes takes longer than what is to be measured.
        """
        import torch

        groups, m, n, k = (problem[name] for name in ("groups", "m", "n", "k"))
        generator = torch.Generator(device="cpu").manual_seed(seed)
        dtype = getattr(torch, problem.dtype)
        a = torch.randn(m, k, generator=generator, dtype=torch.float32).to(dtype=dtype, device=device)
        stored = (groups, n, k) if problem["layout"] == "nt" else (groups, k, n)
        b = torch.empty(stored, dtype=dtype, device=device)
        drawn = torch.empty(0)
        for group, matrix in enumerate(b):
            if group == 0 or b.numel() <= MOST_DRAWN:
                drawn = torch.randn(stored[1:], generator=generator, dtype=torch.float32).to(device=device)
            matrix.copy_(drawn if b.numel() <= MOST_DRAWN else drawn.roll(group, 0))
        offsets = torch.from_numpy(draw_ends(problem, seed)).to(device)
        return a, b.transpose(1, 2) if problem["layout"] == "nt" else b, offsets

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        import torch

        a, b, offsets = inputs
        out = torch.zeros(problem["m"], problem["n"], dtype=torch.float64, device=a.device)
        start = 0
        for matrix, end in zip(b, offsets.tolist(), strict=True):
            out[start:end] = a[start:end].double() @ matrix.double()
            start = end
        return out

    def tolerance(self, problem: Problem) -> Tolerance:
        return reduction_tolerance(problem, problem["k"])

    def flops(self, problem: Problem) -> float:
        return 2.0 * problem["m"] * problem["n"] * problem["k"]

    def traffic_bytes(self, problem: Problem) -> float:
        """As the contract says; of B what the groups that are expected to have rows read."""
        m, n, k = (float(problem[name]) for name in ("m", "n", "k"))
        return problem.element_bytes * (m * k + expected_busy_groups(problem) * k * n + m * n)


# One line a variant.
import kernelcast.kernels.ops.grouped_gemm.chunked_bmm  # noqa: E402
import kernelcast.kernels.ops.grouped_gemm.every_group  # noqa: E402
import kernelcast.kernels.ops.grouped_gemm.group_loop  # noqa: E402
import kernelcast.kernels.ops.grouped_gemm.triton_grouped  # noqa: E402
import kernelcast.kernels.ops.grouped_gemm.triton_grouped_persistent  # noqa: E402
import kernelcast.kernels.ops.grouped_gemm.triton_grouped_split_k  # noqa: E402
import kernelcast.kernels.ops.grouped_gemm.vendor  # noqa: E402, F401
