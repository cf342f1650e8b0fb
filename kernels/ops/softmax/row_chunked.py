"""Softmax from single torch calls, by chunks of rows."""

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
    return schema.widened_bytes(problem, columns["chunk"] * float(problem["columns"]))


@register_variant("softmax")
class RowChunked(Variant):
    """The composed variant on one chunk of rows after another, so that all its passes but the first are over cache."""

    name = "row_chunked"
    backend = "torch"
    doc = "amax, sub, exp_, sum, div over one chunk of rows after another"
    parameters = (Parameter("chunk", (16, 64, 256, 1024), "rows a step", quick=(64, 1024)),)
    rules = (
        schema.part_rule("rows", "composed"),
        schema.steps_rule("rows"),
        schema.scratch_rule(_scratch_bytes),
    )
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        steps = schema.steps(problem, columns, "rows")
        piece = 2.0 * problem.element_bytes * problem["columns"] * columns["chunk"]
        return Work(
            flops=operation("softmax").flops(problem),
            traffic_bytes=schema.element_bytes(problem)
            * schema.cached_passes(device, piece, schema.COMPOSED_PASSES),
            scratch_bytes=_scratch_bytes(problem, columns),
            calls=5.0 * steps,
            programs=columns["chunk"],
            inner_steps=steps,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        layout, chunk = problem["layout"], int(config["chunk"])

        def run(x: torch.Tensor) -> torch.Tensor:
            whole, dim = pieces.stored(x, layout)
            out = empty(whole.shape, dtype=x.dtype, device=x.device)
            for source, target in zip(whole.split(chunk, 1 - dim), out.split(chunk, 1 - dim), strict=True):
                pieces.compose_into(target, source, dim)
            return out if layout == "row" else out.t()

        return run
