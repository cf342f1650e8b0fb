"""torch's own CPU convolution, with oneDNN switched off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import HAS_IMAGES, SHARED_MODULES, in_order, scratch_rule
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 64


def _held_bytes(geometry: Geometry, columns: Columns) -> Amount:
    """The patches of one group, of all images: torch unfolds the batch before it multiplies."""
    if geometry.taps == 1 and geometry.stride == (1, 1) and geometry.pad == (0, 0):
        return 0.0
    return float(geometry.element_bytes) * geometry.n * geometry.reduction * geometry.p * geometry.q


@register_variant("conv2d")
class Native(Variant):
    """``torch.nn.functional.conv2d`` without oneDNN: NNPACK's Winograd for large float32 batches, else im2col.

    The switch belongs to the process: another thread that convolves during a call takes this path too.
    """

    name = "native"
    backend = "vendor"
    doc = "torch.nn.functional.conv2d with oneDNN off"
    source_modules = SHARED_MODULES
    rules = (
        HAS_IMAGES,
        Rule(
            "cpu",
            "oneDNN serves the CPU alone, so that switching it off changes nothing elsewhere",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"a {device.kind}",
        ),
        Rule(
            "few-groups",
            "torch's own convolution takes the groups one after the other, a handful of calls each",
            check=lambda problem, columns, device: problem["groups"] <= MAX_GROUPS,
            explain=lambda problem, columns, device: f"{problem['groups']} > {MAX_GROUPS} groups",
        ),
        scratch_rule(_held_bytes),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        # Each group's channels are cut out before, and the outputs are concatenated after.
        split = geometry.input_bytes + geometry.output_bytes if geometry.groups > 1 else 0.0
        return Work(
            flops=geometry.flops,
            traffic_bytes=geometry.traffic_bytes,
            scratch_bytes=_held_bytes(geometry, columns) * geometry.groups + split,
            calls=2.0 * geometry.groups + (geometry.groups > 1),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.backends import mkldnn
        from torch.nn.functional import conv2d

        g = Geometry.of(problem)

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            # None leaves oneDNN's other switches as they are; their defaults would set TF32, with a warning.
            with mkldnn.flags(enabled=False, deterministic=None, allow_tf32=None):
                out = conv2d(x, weight, None, g.stride, g.pad, g.dilation, g.groups)
            return in_order(out, g.channels_last)

        return run
