"""Softmax from single torch calls over the whole matrix."""

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
    return schema.widened_bytes(problem, float(problem["rows"]) * problem["columns"])


@register_variant("softmax")
class Composed(Variant):
    """Maximum, subtraction, exponential, sum and division, each one torch call; in place where it can be.

    Each call is spread over all threads whatever the shape, where a fused softmax gives each thread rows of its own: it
    may win where rows are few and long.
    """

    name = "composed"
    backend = "torch"
    doc = "amax, sub, exp_, sum and a normalisation, one call each"
    parameters = (
        Parameter(
            "normalise", ("divide", "multiply"), "by the sum, or with its reciprocal", quick=("divide",)
        ),
    )
    rules = (schema.scratch_rule(_scratch_bytes),)
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        matrix = schema.element_bytes(problem)
        return Work(
            flops=operation("softmax").flops(problem),
            traffic_bytes=matrix * schema.cached_passes(device, 2.0 * matrix, schema.COMPOSED_PASSES),
            scratch_bytes=_scratch_bytes(problem, columns),
            calls=5.0 + (columns["normalise"] == "multiply"),
            programs=problem["rows"],
            inner_steps=1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        layout, multiply = problem["layout"], config["normalise"] == "multiply"

        def run(x: torch.Tensor) -> torch.Tensor:
            whole, dim = pieces.stored(x, layout)
            out = empty(whole.shape, dtype=x.dtype, device=x.device)
            pieces.compose_into(out, whole, dim, multiply=multiply)
            return out if layout == "row" else out.t()

        return run
