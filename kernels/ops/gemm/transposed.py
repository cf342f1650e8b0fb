"""The same product the other way round: C = (B^T A^T)^T."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("gemm")
class Transposed(Variant):
    """``torch.mm`` of the transposed operands into a transposed output.

    Libraries block m and n differently, so a tall product may run faster as a wide one. The result is stored
    row-major as the caller expects: written through a transposed view, or copied, as ``output`` says.
    """

    name = "transposed"
    backend = "torch"
    doc = "torch.mm(B^T, A^T), stored transposed"
    parameters = (Parameter("output", ("view", "copy"), "how the transposed result becomes row-major"),)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        copied = float(problem.element_bytes) * problem["m"] * problem["n"]
        return Work(
            flops=gemm.flops(problem),
            traffic_bytes=gemm.traffic_bytes(problem),
            scratch_bytes=(columns["output"] == "copy") * copied,
            calls=1.0 + (columns["output"] == "copy"),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        def through_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
            torch.mm(b.t(), a.t(), out=out.t())
            return out

        def through_copy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(b.t(), a.t()).t().contiguous()

        return through_view if config["output"] == "view" else through_copy
