"""torch's layer norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.layernorm.pieces import EPSILON
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("layernorm")
class Vendor(Variant):
    """``torch.nn.functional.layer_norm`` over the last dimension."""

    name = "vendor"
    backend = "vendor"
    doc = "torch.nn.functional.layer_norm"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        layernorm = operation("layernorm")
        return Work(flops=layernorm.flops(problem), traffic_bytes=layernorm.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.nn.functional import layer_norm

        shape = (problem["columns"],)

        def run(
            x: torch.Tensor,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            *,
            eps: float = EPSILON["layernorm"],
        ) -> torch.Tensor:
            return layer_norm(x, shape, weight, bias, eps)

        return run
