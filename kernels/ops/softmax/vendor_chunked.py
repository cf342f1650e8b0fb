"""torch's softmax by chunks of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.softmax import schema
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("softmax")
class VendorChunked(Variant):
    """``torch.softmax(out=...)`` on one chunk of rows after another, into parts of one output."""

    name = "vendor_chunked"
    backend = "torch"
    doc = "torch.softmax(out=...) over one chunk of rows after another"
    parameters = (Parameter("chunk", (16, 64, 256, 1024), "rows a step", quick=(256,)),)
    rules = (
        Rule(
            "rows-adjacent",
            "a part of a transposed output is not contiguous, so torch would compute it elsewhere and copy it",
            check=lambda problem, columns, device: problem["layout"] == "row",
            explain=lambda problem, columns, device: f"layout={problem['layout']}",
        ),
        schema.part_rule("rows", "vendor"),
        schema.steps_rule("rows"),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        softmax = operation("softmax")
        steps = schema.steps(problem, columns, "rows")
        return Work(
            flops=softmax.flops(problem),
            traffic_bytes=softmax.traffic_bytes(problem),
            calls=steps,
            programs=columns["chunk"],
            inner_steps=steps,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        chunk = int(config["chunk"])

        def run(x: torch.Tensor) -> torch.Tensor:
            out = empty(x.shape, dtype=x.dtype, device=x.device)
            for source, target in zip(x.split(chunk), out.split(chunk), strict=True):
                torch.softmax(source, 1, out=target)
            return out

        return run
