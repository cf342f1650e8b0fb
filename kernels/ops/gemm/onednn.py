"""oneDNN's product of float32 matrices, where torch.mm would call MKL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.errors import KernelcastError
from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("gemm")
class OneDnn(Variant):
    """oneDNN's inner product, through the operator that torch.compile's CPU backend emits for linear layers."""

    name = "onednn"
    backend = "torch"
    doc = "oneDNN's inner product"
    rules = (
        Rule(
            "cpu",
            "oneDNN is built for CPUs in torch",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
        ),
        Rule(
            "float32",
            "torch.mm itself calls oneDNN for 16-bit types on CPUs that multiply them, and on others it has no kernel",
            check=lambda problem, columns, device: problem.dtype == "float32",
            explain=lambda problem, columns, device: problem.dtype,
        ),
        Rule(
            "not-empty",
            "oneDNN has no inner product over an empty dimension",
            check=lambda problem, columns, device: min(problem["m"], problem["n"], problem["k"]) > 0,
            explain=lambda problem, columns, device: f"m={problem['m']}, n={problem['n']}, k={problem['k']}",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        return Work(flops=gemm.flops(problem), traffic_bytes=gemm.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        """As the contract says.

        Raises:
            KernelcastError: this torch was built without oneDNN.
        """
        import torch

        if not torch.backends.mkldnn.is_available():
            raise KernelcastError(
                "This torch has no oneDNN (torch.backends.mkldnn); use another variant of gemm."
            )
        inner_product = torch.ops.mkldnn._linear_pointwise

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return inner_product(a, b.t(), None, "none", [], "")

        return run
