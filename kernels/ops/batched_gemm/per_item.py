"""One product after the other."""

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

MAX_CALLS = 512


@register_variant("batched_gemm")
class PerItem(Variant):
    """``torch.mm`` of each pair of matrices into its slice of the output.

    Libraries choose their kernel for one large product with more care than for a batch, and split k where a batched
    product cannot.
    """

    name = "per_item"
    backend = "torch"
    doc = "torch.mm for each product"
    rules = (
        Rule(
            "calls-bounded",
            f"each product is a call from Python: more than {MAX_CALLS} of them cost more than they save",
            check=lambda problem, columns, device: problem["batch"] <= MAX_CALLS,
            explain=lambda problem, columns, device: f"batch={problem['batch']}",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        batched = operation("batched_gemm")
        return Work(
            flops=batched.flops(problem),
            traffic_bytes=batched.traffic_bytes(problem),
            calls=float(problem["batch"]),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((a.shape[0], a.shape[1], b.shape[2]), dtype=a.dtype, device=a.device)
            for of_a, of_b, target in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
                torch.mm(of_a, of_b, out=target)
            return out

        return run
