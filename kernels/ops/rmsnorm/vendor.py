"""torch's RMS norm."""

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


@register_variant("rmsnorm")
class Vendor(Variant):
    """``torch.nn.functional.rms_norm`` over the last dimension."""

    name = "vendor"
    backend = "vendor"
    doc = "torch.nn.functional.rms_norm"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        rmsnorm = operation("rmsnorm")
        return Work(flops=rmsnorm.flops(problem), traffic_bytes=rmsnorm.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.nn.functional import rms_norm

        shape = (problem["columns"],)

        def run(
            x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = EPSILON["rmsnorm"]
        ) -> torch.Tensor:
            return rms_norm(x, shape, weight, eps)

        return run
