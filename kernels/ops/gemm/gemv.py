"""Matrix-vector products in place of a matrix product."""

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

MAX_ROWS = 8


@register_variant("gemm")
class Gemv(Variant):
    """``torch.mv``: once where C is one column, once a row where C has few rows.

    Libraries pack the operands of a matrix product before they multiply; a matrix-vector product reads its matrix
    once and packs nothing.
    """

    name = "gemv"
    backend = "torch"
    doc = "torch.mv, for one column or few rows"
    rules = (
        Rule(
            "few-vectors",
            f"each product reads the whole matrix again: beyond {MAX_ROWS} rows a matrix product reads it fewer times",
            check=lambda problem, columns, device: problem["n"] == 1 or problem["m"] <= MAX_ROWS,
            explain=lambda problem, columns, device: f"m={problem['m']}, n={problem['n']}",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        vectors = 1 if problem["n"] == 1 else problem["m"]
        again = float(problem.element_bytes) * problem["k"] * problem["n"] * max(vectors - 1, 0)
        return Work(
            flops=gemm.flops(problem), traffic_bytes=gemm.traffic_bytes(problem) + again, calls=float(vectors)
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        def one_column(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((a.shape[0], 1), dtype=a.dtype, device=a.device)
            torch.mv(a, b[:, 0], out=out[:, 0])
            return out

        def few_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
            columns = b.t()
            for row in range(a.shape[0]):
                torch.mv(columns, a[row], out=out[row])
            return out

        return one_column if problem["n"] == 1 else few_rows
