"""Softmax whose sums are a product with a vector of ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.softmax import pieces, schema
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch


def _scratch_bytes(problem: Problem, columns: Columns) -> Amount:
    widened = schema.widened_bytes(problem, float(problem["rows"]) * problem["columns"])
    return widened + 4.0 * problem["columns"]


@register_variant("softmax")
class MatmulSum(Variant):
    """The composed variant with each row's sum as a matrix-vector product, which a BLAS may do faster than a sum."""

    name = "matmul_sum"
    backend = "torch"
    doc = "amax, sub, exp_, mv with ones, div"
    rules = (
        Rule(
            "no-tf32",
            "a product in TF32 would round the exponentials before they are added",
            check=lambda problem, columns, device: not problem.allow_tf32,
            explain=lambda problem, columns, device: "allow_tf32=True",
        ),
        schema.scratch_rule(_scratch_bytes),
    )
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        matrix = schema.element_bytes(problem)
        return Work(
            # The product multiplies by one before it adds.
            flops=operation("softmax").flops(problem) + float(problem["rows"]) * problem["columns"],
            traffic_bytes=matrix * schema.cached_passes(device, 2.0 * matrix, schema.COMPOSED_PASSES),
            scratch_bytes=_scratch_bytes(problem, columns),
            calls=6.0,
            programs=problem["rows"],
            inner_steps=1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        layout = problem["layout"]

        def run(x: torch.Tensor) -> torch.Tensor:
            whole, dim = pieces.stored(x, layout)
            out = empty(whole.shape, dtype=x.dtype, device=x.device)
            peak = whole.amax(dim, keepdim=True).float()
            weights = torch.sub(whole, peak, out=out) if x.dtype == torch.float32 else whole - peak
            weights.exp_()
            rows = weights if layout == "row" else weights.t()
            ones = torch.ones(rows.shape[1], dtype=torch.float32, device=x.device)
            torch.div(weights, torch.mv(rows, ones).unsqueeze(dim), out=out)
            return out if layout == "row" else out.t()

        return run
