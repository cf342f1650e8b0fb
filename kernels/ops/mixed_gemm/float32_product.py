"""A 16-bit product computed as a float32 one."""

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


@register_variant("mixed_gemm")
class Float32Product(Variant):
    """A and the scaled weight in float32, multiplied by the float32 library, and the result rounded once.

    Many CPUs multiply float32 natively and 16-bit types by way of it, tile by tile. The weight must be cast anyhow.
    """

    name = "float32_product"
    backend = "torch"
    doc = "(a.float() @ (b * scale.float())).to(a.dtype)"
    rules = (
        Rule(
            "cpu",
            "GPUs multiply 16-bit types several times faster than float32",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
        ),
        Rule(
            "16-bit",
            "a float32 product is this already",
            check=lambda problem, columns, device: problem.element_bytes == 2,
            explain=lambda problem, columns, device: problem.dtype,
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        mixed = operation("mixed_gemm")
        m, n, k = (float(problem[name]) for name in ("m", "n", "k"))
        return Work(
            flops=mixed.flops(problem) + k * n,
            traffic_bytes=mixed.traffic_bytes(problem),
            scratch_bytes=4.0 * (m * k + k * n + n + m * n),
            calls=5.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (a.float() @ (b * scale.float())).to(a.dtype)

        return run
