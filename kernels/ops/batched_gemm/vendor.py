"""The vendor library through torch: cuBLAS, hipBLASLt, oneDNN or MKL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work


@register_variant("batched_gemm")
class Vendor(Variant):
    """``torch.bmm``.

    An expanded operand is a batch of equal matrices to it (with a batch stride of 0 where the library takes one): it does
    not fold the batch into rows of one product, as ``torch.matmul`` would.
    """

    name = "vendor"
    backend = "vendor"
    doc = "torch.bmm: the vendor's BLAS, strided batched"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        batched = operation("batched_gemm")
        return Work(flops=batched.flops(problem), traffic_bytes=batched.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        return torch.bmm
