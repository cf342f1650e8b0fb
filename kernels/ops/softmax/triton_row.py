"""Softmax in Triton: one program a row, which it holds whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.softmax import triton_pieces as pieces
from kernelcast.kernels.ops.softmax.schema import ELEMENT_FLOPS
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _elements(problem: Problem, columns: Columns) -> np.ndarray:
    return np.full(len(columns["num_warps"]), pieces.padded_columns(problem))


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return np.full(len(columns["num_warps"]), problem["rows"])


@register_variant("softmax")
class TritonRow(Variant):
    """A program reads its row once, padded to a power of two, and keeps it in registers until it is written.

    There is no loop, so a software pipeline would change nothing: the only parameter is the number of warps.
    """

    name = "triton_row"
    backend = "triton"
    doc = "Triton: one program a row, held in registers"
    parameters = (Parameter("num_warps", (1, 2, 4, 8, 16), "warps of a program"),)
    rules = (
        *pieces.COMMON_RULES,
        pieces.ROWS_ADJACENT,
        pieces.ROW_FITS,
        pieces.registers_rule(_elements, held=1),
        pieces.threads_busy_rule(_elements),
        pieces.programs_rule(_programs),
    )
    source_modules = (
        "kernelcast.kernels.ops.softmax.triton_pieces",
        "kernelcast.kernels.ops.softmax.triton_row_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_row_rules",
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        padded = float(pieces.padded_columns(problem))
        return Work(
            flops=ELEMENT_FLOPS * problem["rows"] * padded,
            traffic_bytes=operation("softmax").traffic_bytes(problem),
            programs=problem["rows"],
            warps=columns["num_warps"],
            shared_bytes=pieces.reduction_bytes(1, columns),
            accumulators=padded / pieces.threads(columns, device),
            inner_steps=1.0,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.softmax.triton_row_jit import softmax_row

        return pieces.row_spec(softmax_row, problem, config, pieces.padded_columns(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        rows = problem["rows"]
        launch = self.compile_spec(problem, config).bind((rows,))

        def run(x: torch.Tensor) -> torch.Tensor:
            out = empty(x.shape, dtype=x.dtype, device=x.device)
            if rows:
                launch(x, out)
            return out

        return run
