"""Softmax by chunks of columns, in three sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.softmax import pieces, schema
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch


def _scratch_bytes(problem: Problem, columns: Columns) -> Amount:
    """The exponentials in float32, which wait for the sum of their row."""
    return schema.widened_bytes(problem, float(problem["rows"]) * problem["columns"])


@register_variant("softmax")
class ColumnChunked(Variant):
    """A maximum over the row, then exponentials and their sum chunk by chunk, then the division.

    The subtraction, exponential and sum of a chunk of long rows stay in cache. The maximum is that of the whole row, so
    nothing is rescaled, and a chunk that holds nothing but -inf needs no care.
    """

    name = "column_chunked"
    backend = "torch"
    doc = "amax; sub, exp_ and sum over one chunk of columns after another; div"
    parameters = (Parameter("chunk", (1024, 4096, 16384), "columns a step", quick=(4096,)),)
    rules = (
        schema.part_rule("columns", "composed"),
        schema.steps_rule("columns"),
        schema.scratch_rule(_scratch_bytes),
    )
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        steps = schema.steps(problem, columns, "columns")
        matrix = schema.element_bytes(problem)
        piece = 2.0 * problem.element_bytes * problem["rows"] * columns["chunk"]
        # The maximum reads the matrix; the division reads and writes the exponentials. Of the sweep between them a chunk
        # that stays in cache leaves one read and one write; else the exponential and the sum add three passes.
        passes = 3.0 + schema.cached_passes(device, piece, 5.0)
        return Work(
            flops=operation("softmax").flops(problem) + problem["rows"] * steps.astype(float),
            traffic_bytes=matrix * passes,
            scratch_bytes=_scratch_bytes(problem, columns),
            calls=4.0 * steps + 2.0,
            programs=problem["rows"],
            inner_steps=steps,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        layout, chunk = problem["layout"], int(config["chunk"])

        def run(x: torch.Tensor) -> torch.Tensor:
            whole, dim = pieces.stored(x, layout)
            out = empty(whole.shape, dtype=x.dtype, device=x.device)
            peak = whole.amax(dim, keepdim=True).float()
            weights = (
                out if x.dtype == torch.float32 else empty(whole.shape, dtype=torch.float32, device=x.device)
            )
            total = torch.zeros_like(peak)
            for source, target in zip(whole.split(chunk, dim), weights.split(chunk, dim), strict=True):
                torch.sub(source, peak, out=target)
                total += target.exp_().sum(dim, keepdim=True)
            torch.div(weights, total, out=out)
            return out if layout == "row" else out.t()

        return run
