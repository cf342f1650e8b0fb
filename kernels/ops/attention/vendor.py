"""torch's fused attention."""

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


@register_variant("attention")
class Vendor(Variant):
    """``torch.nn.functional.scaled_dot_product_attention``, with the backend that torch picks."""

    name = "vendor"
    backend = "vendor"
    doc = "F.scaled_dot_product_attention"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        attention = operation("attention")
        return Work(flops=attention.flops(problem), traffic_bytes=attention.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.nn.functional import scaled_dot_product_attention

        causal = problem["causal"]
        grouped = problem["heads"] != problem["kv_heads"]

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
            # Some versions of torch and some backends store the heads of one query side by side. Free elsewhere.
            return out.contiguous()

        return run
