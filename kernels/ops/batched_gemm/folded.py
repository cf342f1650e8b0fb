"""A batch of rows against one matrix as a single product."""

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


def _rows_at_one_distance(problem: Problem) -> bool:
    # One row of each matrix, its elements adjacent, is a row-major matrix whatever the layout says.
    return bool(problem["layout"][0] == "n" or (problem["m"] == 1 and problem["lda"] == 0))


@register_variant("batched_gemm")
class Folded(Variant):
    """``torch.mm`` of all rows of A, batch by batch, by the one matrix that B is.

    The rows of a row-major A lie at one distance throughout the batch, and so do those of the output, so both are
    matrices of batch * m rows as they lie in memory.
    """

    name = "folded"
    backend = "torch"
    doc = "torch.mm over batch * m rows, where B is broadcast"
    rules = (
        Rule(
            "b-broadcast",
            "only rows that are multiplied by the same matrix are one product",
            check=lambda problem, columns, device: problem["broadcast"] == "b" or problem["batch"] == 1,
            explain=lambda problem, columns, device: (
                f"broadcast={problem['broadcast']}, batch={problem['batch']}"
            ),
        ),
        Rule(
            "rows-at-one-distance",
            "the rows of a column-major A interleave within each matrix, and would have to be copied to lie at one "
            "distance",
            check=lambda problem, columns, device: _rows_at_one_distance(problem),
            explain=lambda problem, columns, device: (
                f"layout={problem['layout']}, m={problem['m']}, lda={problem['lda']}"
            ),
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        batched = operation("batched_gemm")
        return Work(flops=batched.flops(problem), traffic_bytes=batched.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        batch, m, n, k = (int(problem[name]) for name in ("batch", "m", "n", "k"))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a.reshape(batch * m, k), b[0]).view(batch, m, n)

        return run
