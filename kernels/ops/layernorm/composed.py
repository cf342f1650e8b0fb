"""Layer norm from single torch calls over the whole matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.layernorm import pieces
from kernelcast.kernels.ops.softmax.schema import element_bytes, scratch_rule
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

STATISTICS = Parameter(
    "statistics",
    ("mean", "norm", "var_mean"),
    "of a row: means of it and of its squares; or mean and 2-norm; or torch.var_mean",
)
VAR_MEAN_ON_GPUS = Rule(
    "var-mean-on-gpus",
    "on a CPU torch.var_mean updates mean and variance element by element, which takes 30 to 100 times as long as two sums",
    check=lambda problem, columns, device: (columns["statistics"] != "var_mean") | (device.kind == "gpu"),
    explain=lambda problem, columns, device: f"statistics=var_mean on a {device.kind}",
)


def _scratch_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    elements = float(problem["rows"]) * problem["columns"]
    return pieces.composed_scratch_bytes(problem, columns, elements)


@register_variant("layernorm")
class Composed(Variant):
    """Statistics, subtraction, scaling, weight and bias, each one torch call, in place where it can be.

    Each call is spread over all threads whatever the shape, where a fused norm gives each thread rows of its own: it may
    win where rows are few and long.
    """

    name = "composed"
    backend = "torch"
    doc = "mean, sub, a mean of squares, rsqrt, mul and addcmul, one call each"
    parameters = (STATISTICS,)
    rules: ClassVar[tuple[Rule, ...]] = (VAR_MEAN_ON_GPUS, scratch_rule(_scratch_bytes))
    source_modules: ClassVar[tuple[str, ...]] = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        return Work(
            flops=operation(problem.operation).flops(problem),
            traffic_bytes=pieces.composed_traffic_bytes(
                problem, columns, device, 2.0 * element_bytes(problem)
            ),
            scratch_bytes=_scratch_bytes(problem, columns),
            calls=pieces.composed_calls(problem, columns),
            programs=problem["rows"],
            inner_steps=1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        statistics, centre = str(config["statistics"]), pieces.subtracts_mean(problem)

        def run(
            x: torch.Tensor,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            *,
            eps: float = pieces.EPSILON[problem.operation],
        ) -> torch.Tensor:
            out = empty(x.shape, dtype=x.dtype, device=x.device)
            pieces.normalise_into(out, x, weight, bias, eps=eps, statistics=statistics, centre=centre)
            return out

        return run
