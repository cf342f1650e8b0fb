"""A 1x1 convolution as the matrix product that it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import DENSE, HAS_IMAGES, ORDERS, SHARED_MODULES, in_order
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("conv2d")
class Matmul1x1(Variant):
    """One product of the weight with all pixels.

    Channels first: ``[k, c] @ [c, h * w]`` for each image, as one batched product. Channels last:
    ``[n * h * w, c] @ [c, k]``. Neither copies anything if it is the caller's layout.
    """

    name = "matmul_1x1"
    backend = "torch"
    doc = "torch.bmm or torch.mm over the pixels"
    parameters = (Parameter("channels", ORDERS, "memory order of the operands: channels first or last"),)
    source_modules = SHARED_MODULES
    rules = (
        HAS_IMAGES,
        Rule(
            "one-tap",
            "only a 1x1 kernel is a plain product",
            check=lambda problem, columns, device: problem["r"] == problem["s"] == 1,
            explain=lambda problem, columns, device: f"a {problem['r']}x{problem['s']} kernel",
        ),
        Rule(
            "all-pixels",
            "a stride or padding makes output pixels that are not the input's",
            check=lambda problem, columns, device: (
                problem["stride_h"] == problem["stride_w"] == 1 and problem["pad_h"] == problem["pad_w"] == 0
            ),
            explain=lambda problem, columns, device: (
                f"stride {problem['stride_h']}x{problem['stride_w']}, padding {problem['pad_h']}x{problem['pad_w']}"
            ),
        ),
        DENSE,
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        converts = (columns["channels"] == "last") != geometry.channels_last
        return Work(
            flops=geometry.flops,
            traffic_bytes=geometry.traffic_bytes,
            scratch_bytes=converts * (geometry.input_bytes + geometry.output_bytes),
            calls=1.0 + 2.0 * converts,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        g = Geometry.of(problem)

        def first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            pixels = in_order(x, False).view(g.n, g.c, g.h * g.w)
            out = torch.bmm(weight.view(g.k, g.c).expand(g.n, g.k, g.c), pixels)
            return in_order(out.view(g.n, g.k, g.h, g.w), g.channels_last)

        def last(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            pixels = in_order(x, True).permute(0, 2, 3, 1).view(g.n * g.h * g.w, g.c)
            out = torch.mm(pixels, weight.view(g.k, g.c).t())
            return in_order(out.view(g.n, g.h, g.w, g.k).permute(0, 3, 1, 2), g.channels_last)

        return last if config["channels"] == "last" else first
