"""Layer norm from single torch calls, by chunks of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.layernorm import pieces
from kernelcast.kernels.ops.layernorm.composed import STATISTICS, VAR_MEAN_ON_GPUS
from kernelcast.kernels.ops.softmax.schema import part_rule, scratch_rule, steps, steps_rule
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

CHUNK = Parameter("chunk", (16, 64, 256, 1024), "rows a step", quick=(64, 1024))


def _scratch_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    elements = columns["chunk"] * float(problem["columns"])
    return pieces.composed_scratch_bytes(problem, columns, elements)


@register_variant("layernorm")
class RowChunked(Variant):
    """The composed variant on one chunk of rows after another, so that all its passes but the first are over cache.

    The library's own norm is not among the chunks: it passes over memory once as it is, and would have to be copied from
    a tensor of its own into its part of the output.
    """

    name = "row_chunked"
    backend = "torch"
    doc = "the composed calls over one chunk of rows after another"
    parameters = (STATISTICS, CHUNK)
    rules: ClassVar[tuple[Rule, ...]] = (
        VAR_MEAN_ON_GPUS,
        part_rule("rows", "composed"),
        steps_rule("rows"),
        scratch_rule(_scratch_bytes),
    )
    source_modules: ClassVar[tuple[str, ...]] = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        count = steps(problem, columns, "rows")
        piece = 2.0 * problem.element_bytes * problem["columns"] * columns["chunk"]
        return Work(
            flops=operation(problem.operation).flops(problem),
            traffic_bytes=pieces.composed_traffic_bytes(problem, columns, device, piece),
            scratch_bytes=_scratch_bytes(problem, columns),
            calls=pieces.composed_calls(problem, columns) * count,
            programs=columns["chunk"],
            inner_steps=count,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        chunk, statistics = int(config["chunk"]), str(config["statistics"])
        centre = pieces.subtracts_mean(problem)

        def run(
            x: torch.Tensor,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            *,
            eps: float = pieces.EPSILON[problem.operation],
        ) -> torch.Tensor:
            out = empty(x.shape, dtype=x.dtype, device=x.device)
            for source, target in zip(x.split(chunk), out.split(chunk), strict=True):
                pieces.normalise_into(
                    target, source, weight, bias, eps=eps, statistics=statistics, centre=centre
                )
            return out

        return run
