"""Torch's own product of a weight that was cast and scaled before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.mixed_gemm.schema import cast_weight_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("mixed_gemm")
class Vendor(Variant):
    """``a @ (b.to(a.dtype) * scale)``: the definition as one writes it in torch."""

    name = "vendor"
    backend = "vendor"
    doc = "a @ (b.to(a.dtype) * scale): the weight cast, scaled, multiplied by the vendor's BLAS"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        mixed = operation("mixed_gemm")
        return Work(
            flops=mixed.flops(problem) + float(problem["k"]) * problem["n"],
            traffic_bytes=mixed.traffic_bytes(problem),
            # The cast weight, and the cast and scaled one.
            scratch_bytes=2.0 * cast_weight_bytes(problem),
            calls=3.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return a @ (b.to(a.dtype) * scale)

        return run
