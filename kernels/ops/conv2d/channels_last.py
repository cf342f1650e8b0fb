"""The vendor library on channels_last copies of tensors that the caller has as nchw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import HAS_IMAGES, SHARED_MODULES
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("conv2d")
class ChannelsLast(Variant):
    """``torch.nn.functional.conv2d`` on channels_last tensors, converted on the way in and out.

    Libraries pick other kernels for that format; with many channels they can beat the default by more than the
    conversions cost.
    """

    name = "channels_last"
    backend = "vendor"
    doc = "torch.nn.functional.conv2d on channels_last copies"
    source_modules = SHARED_MODULES
    rules = (
        HAS_IMAGES,
        Rule(
            "caller-is-nchw",
            "tensors that are channels_last already need no conversion: this would be the vendor variant again",
            check=lambda problem, columns, device: problem["layout"] == "nchw",
            explain=lambda problem, columns, device: f"layout={problem['layout']}",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        return Work(
            flops=geometry.flops,
            traffic_bytes=geometry.traffic_bytes,
            scratch_bytes=geometry.traffic_bytes,
            calls=4.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch
        from torch.nn.functional import conv2d

        g = Geometry.of(problem)

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            # .to() and not .contiguous(): with one channel both formats are dense, and only .to() changes the strides
            # by which torch picks the kernel.
            x = x.to(memory_format=torch.channels_last)
            weight = weight.to(memory_format=torch.channels_last)
            return conv2d(x, weight, None, g.stride, g.pad, g.dilation, g.groups).contiguous()

        return run
