"""conv2d: y[n, k, p, q] = sum over c, r, s of x[n, c, p * stride + r * dilation - pad, ...] * weight[k, c, r, s]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.ops.conv2d.schema import CONV2D, Geometry, convolution_tolerance
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation

if TYPE_CHECKING:
    import torch


@register_operation
class Conv2d(Operation):
    """Two-dimensional convolution (correlation, as in torch) without bias, dense, grouped or depthwise.

    Tensors are indexed as torch's: x [n, c, h, w], weight [k, c / groups, r, s], output [n, k, p, q]. ``layout`` is
    their order in memory: ``nchw`` is torch's contiguous format, ``nhwc`` its channels_last.
    """

    name = "conv2d"
    doc = "y[n, k] = sum over c of correlate(x[n, c], weight[k, c])"
    schema = CONV2D

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """x [n, c, h, w] and weight [k, c / groups, r, s], in the memory format that ``layout`` names."""
        import torch

        g = Geometry.of(problem)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        memory_format = torch.channels_last if g.channels_last else torch.contiguous_format
        inputs = []
        for shape in ((g.n, g.c, g.h, g.w), (g.k, g.group_channels, g.r, g.s)):
            values = torch.randn(shape, generator=generator, dtype=torch.float32)
            # Into a new tensor, not by .contiguous(): with one channel or one pixel that would keep nchw's strides,
            # and libraries choose by strides.
            tensor = torch.empty(
                shape, dtype=getattr(torch, problem.dtype), device=device, memory_format=memory_format
            )
            inputs.append(tensor.copy_(values))
        return tuple(inputs)

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import conv2d

        g = Geometry.of(problem)
        x, weight = (tensor.double().contiguous() for tensor in inputs)
        return conv2d(x, weight, None, g.stride, g.pad, g.dilation, g.groups)

    def tolerance(self, problem: Problem) -> Tolerance:
        return convolution_tolerance(problem)

    def flops(self, problem: Problem) -> float:
        return Geometry.of(problem).flops

    def traffic_bytes(self, problem: Problem) -> float:
        return Geometry.of(problem).traffic_bytes


# One line a variant.
from kernelcast.kernels.ops.conv2d import (  # noqa: E402
    channels_last,  # noqa: F401
    fft,  # noqa: F401
    im2col,  # noqa: F401
    matmul_1x1,  # noqa: F401
    native,  # noqa: F401
    shifted,  # noqa: F401
    triton_depthwise,  # noqa: F401
    triton_implicit_gemm,  # noqa: F401
    vendor,  # noqa: F401
    winograd,  # noqa: F401
)
