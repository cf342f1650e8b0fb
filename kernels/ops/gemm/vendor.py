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


@register_variant("gemm")
class Vendor(Variant):
    """``torch.mm``."""

    name = "vendor"
    backend = "vendor"
    doc = "torch.mm: the vendor's BLAS"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        return Work(flops=gemm.flops(problem), traffic_bytes=gemm.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        return torch.mm
