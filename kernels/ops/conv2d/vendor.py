"""The vendor library through torch, in the caller's layout: cuDNN, MIOpen or oneDNN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import SHARED_MODULES, in_order
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("conv2d")
class Vendor(Variant):
    """``torch.nn.functional.conv2d`` on tensors as the caller has them."""

    name = "vendor"
    backend = "vendor"
    doc = "torch.nn.functional.conv2d in the caller's layout"
    source_modules = SHARED_MODULES

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        return Work(flops=geometry.flops, traffic_bytes=geometry.traffic_bytes)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.nn.functional import conv2d

        g = Geometry.of(problem)

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return in_order(conv2d(x, weight, None, g.stride, g.pad, g.dilation, g.groups), g.channels_last)

        return run
