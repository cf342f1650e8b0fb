"""torch's softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("softmax")
class Vendor(Variant):
    """``torch.softmax`` over the last dimension, or over the first of what a transposed view is a view of."""

    name = "vendor"
    backend = "vendor"
    doc = "torch.softmax"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        softmax = operation("softmax")
        return Work(flops=softmax.flops(problem), traffic_bytes=softmax.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        def by_row(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x, 1)

        def by_column(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x.t(), 0).t()

        return by_row if problem["layout"] == "row" else by_column
