"""Operands copied to row-major before they are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.schema import operand_dims
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _is_dense(rows: int, columns: int, transposed: bool, leading: int) -> bool:
    """Whether a matrix of these strides is row-major without gaps, as torch's ``is_contiguous`` has it."""
    if rows * columns == 0:
        return True
    if transposed:
        return columns == 1 or (rows == 1 and leading == 1)
    return rows == 1 or leading == columns


def _copied(problem: Problem, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    return columns["copied"] != "b", columns["copied"] != "a"


def _copies_change(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    a_changes, b_changes = (not _is_dense(*dims) for dims in operand_dims(problem))
    copy_a, copy_b = _copied(problem, columns)
    return (~copy_a | a_changes) & (~copy_b | b_changes)


@register_variant("gemm")
class ContiguousOperands(Variant):
    """``torch.mm`` of row-major copies.

    Libraries are tuned for dense rows: a transposed or padded operand may cost more to read in place than to copy.
    """

    name = "contiguous_operands"
    backend = "torch"
    doc = "torch.mm of row-major copies"
    parameters = (Parameter("copied", ("a", "b", "both"), "the operands that are copied"),)
    rules = (
        Rule(
            "copies-change",
            "a copy of an operand that is row-major and dense already changes nothing",
            check=_copies_change,
            explain=lambda problem, columns, device: (
                f"copied={columns['copied'][0]}, layout={problem['layout']}, lda={problem['lda']}, ldb={problem['ldb']}"
            ),
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        copy_a, copy_b = _copied(problem, columns)
        elements = copy_a * float(problem["m"] * problem["k"]) + copy_b * float(problem["k"] * problem["n"])
        return Work(
            flops=gemm.flops(problem),
            # The original is read, and the copy is written and read.
            traffic_bytes=gemm.traffic_bytes(problem) + problem.element_bytes * elements,
            scratch_bytes=problem.element_bytes * elements,
            calls=1.0 + copy_a + copy_b,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        def copy_a(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a.contiguous(), b)

        def copy_b(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a, b.contiguous())

        def copy_both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a.contiguous(), b.contiguous())

        return {"a": copy_a, "b": copy_b, "both": copy_both}[str(config["copied"])]
