"""The product as a linear layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
class Linear(Variant):
    """``torch.nn.functional.linear(a, b.t())``, which does not pass through ``torch.mm``'s own checks and dispatch."""

    name = "linear"
    backend = "torch"
    doc = "torch.nn.functional.linear"
    rules = (
        Rule(
            "cpu",
            "on a GPU a linear layer without bias is torch.mm, call for call",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        return Work(flops=gemm.flops(problem), traffic_bytes=gemm.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.nn.functional import linear

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return linear(a, b.t())

        return run
