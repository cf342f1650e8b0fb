"""The weight cast and scaled in one pass, then multiplied."""

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
class OnePass(Variant):
    """``a @ (b * scale)``: torch's type promotion casts inside the product, so no cast weight is written before it."""

    name = "one_pass"
    backend = "torch"
    doc = "a @ (b * scale): the weight cast and scaled in one pass by type promotion"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        mixed = operation("mixed_gemm")
        return Work(
            flops=mixed.flops(problem) + float(problem["k"]) * problem["n"],
            traffic_bytes=mixed.traffic_bytes(problem),
            scratch_bytes=cast_weight_bytes(problem),
            calls=2.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return a @ (b * scale)

        return run
