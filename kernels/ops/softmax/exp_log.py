"""Softmax as the exponential of torch's log-softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.softmax import pieces, schema
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch


def _scratch_bytes(problem: Problem, columns: Columns) -> Amount:
    """The float32 input that a log-softmax into float32 makes, and its result."""
    return 2.0 * schema.widened_bytes(problem, float(problem["rows"]) * problem["columns"])


@register_variant("softmax")
class ExpLog(Variant):
    """``torch.log_softmax``, then an exponential in place. No division; the logarithms are in float32.

    Logarithms of 16 bits would be off by up to 2**-8 of some 10, and the result with them.
    """

    name = "exp_log"
    backend = "torch"
    doc = "torch.log_softmax, then exp_"
    rules = (schema.scratch_rule(_scratch_bytes),)
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        matrix = schema.element_bytes(problem)
        narrow = problem.element_bytes < 4
        # One more exponential, a logarithm a row.
        extra = float(problem["rows"]) * (problem["columns"] + 1)
        return Work(
            flops=operation("softmax").flops(problem) + extra,
            # The exponential reads and writes the result once more.
            traffic_bytes=matrix * schema.cached_passes(device, 2.0 * matrix, 4.0),
            scratch_bytes=_scratch_bytes(problem, columns),
            calls=2.0 + 2.0 * narrow,
            programs=problem["rows"],
            inner_steps=1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        layout = problem["layout"]

        def run(x: torch.Tensor) -> torch.Tensor:
            whole, dim = pieces.stored(x, layout)
            out = torch.log_softmax(whole, dim, dtype=torch.float32).exp_().to(x.dtype)
            return out if layout == "row" else out.t()

        return run
