"""The weight cast and multiplied, then the columns of the result scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.mixed_gemm.schema import cast_weight_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("mixed_gemm")
class ScaledOutput(Variant):
    """``(a @ b.to(a.dtype)) * scale``: where C is smaller than B, less is scaled."""

    name = "scaled_output"
    backend = "torch"
    doc = "(a @ b.to(a.dtype)) * scale: the columns of C scaled in place"
    rules = (
        Rule(
            "range",
            "sums of unscaled 8-bit weights pass 65504, float16's largest number, where the scaled result would not",
            check=lambda problem, columns, device: problem.dtype != "float16",
            explain=lambda problem, columns, device: problem.dtype,
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        mixed = operation("mixed_gemm")
        unscaled = float(problem.element_bytes) * problem["m"] * problem["n"]
        return Work(
            flops=mixed.flops(problem),
            traffic_bytes=mixed.traffic_bytes(problem),
            scratch_bytes=cast_weight_bytes(problem) + unscaled,
            calls=3.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (a @ b.to(a.dtype)).mul_(scale)

        return run
