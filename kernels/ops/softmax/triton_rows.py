"""Softmax in Triton: several whole rows a program, for short rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels import triton_row_rules as row_rules
from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.softmax import triton_pieces as pieces
from kernelcast.kernels.ops.softmax.schema import ELEMENT_FLOPS
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _elements(problem: Problem, columns: Columns) -> np.ndarray:
    return columns["rows_per_program"] * pieces.padded_columns(problem)


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return -(-problem["rows"] // columns["rows_per_program"])


def shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of one program, in bytes: one float32 for each row and each of the warps that share it.

    In a transposed matrix the threads of a warp are laid along the rows first, which are 32 at most, so that all warps share
    every row. A thread whose loads are as wide as two stores or more sends its rows in turns, of at least 128 bytes.
    """
    if problem["layout"] == "row":
        return row_rules.rows_reduction_bytes(problem, columns, device)
    rows, warps = columns["rows_per_program"], columns["num_warps"]
    aligned = problem["rows"] % row_rules.ALIGNED_ELEMENTS == 0
    wide = row_rules.LOAD_BYTES // problem.element_bytes if aligned else 1
    each = np.clip(
        _elements(problem, columns) // row_rules.threads(columns, device), 1, np.minimum(wide, rows)
    )
    exchanged = np.where(warps > 1, 4.0 * rows * warps, 0.0)
    turns = np.maximum(4 * each // row_rules.LOAD_BYTES, 1)
    return np.maximum(exchanged / turns, np.minimum(exchanged, 128.0))


@register_variant("softmax")
class TritonRows(Variant):
    """As ``triton_row`` with several rows a program, so that short rows fill its threads.

    Takes transposed matrices too: there the rows of one program are adjacent.
    """

    name = "triton_rows"
    backend = "triton"
    doc = "Triton: several rows a program, held in registers"
    parameters = (
        Parameter("rows_per_program", (2, 4, 8, 16, 32), "rows of a program"),
        Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
    )
    rules = (
        *pieces.COMMON_RULES,
        Rule(
            "rows-fill-a-sector",
            f"in a transposed matrix the adjacent elements are of neighbouring rows, and memory is read in pieces of "
            f"{pieces.SECTOR_BYTES} bytes: fewer rows would waste part of each",
            check=lambda problem, columns, device: (
                (problem["layout"] == "row")
                | (columns["rows_per_program"] * problem.element_bytes >= pieces.SECTOR_BYTES)
            ),
            explain=lambda problem, columns, device: (
                f"{columns['rows_per_program'][0]} rows of {problem.element_bytes}-byte elements"
            ),
        ),
        pieces.ROWS_ENOUGH,
        pieces.registers_rule(_elements, held=1),
        pieces.threads_busy_rule(_elements),
        pieces.programs_rule(_programs),
    )
    source_modules = (
        "kernelcast.kernels.ops.softmax.triton_pieces",
        "kernelcast.kernels.ops.softmax.triton_rows_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_row_rules",
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        elements = _elements(problem, columns).astype(np.float64)
        programs = _programs(problem, columns)
        return Work(
            flops=ELEMENT_FLOPS * programs * elements,
            traffic_bytes=operation("softmax").traffic_bytes(problem),
            programs=programs,
            warps=columns["num_warps"],
            shared_bytes=shared_bytes(problem, columns, device),
            accumulators=elements / pieces.threads(columns, device),
            inner_steps=1.0,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.softmax.triton_rows_jit import softmax_rows

        rows, columns = problem["rows"], problem["columns"]
        stride_row, stride_column = (columns, 1) if problem["layout"] == "row" else (1, rows)
        return KernelSpec(
            kernel=softmax_rows,
            tensors=pieces.matrix_pointers(problem),
            integers={
                "rows": rows,
                "columns": columns,
                "stride_row": stride_row,
                "stride_column": stride_column,
            },
            constants={
                "ROWS": int(config["rows_per_program"]),
                "BLOCK": pieces.padded_columns(problem),
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        programs = -(-problem["rows"] // int(config["rows_per_program"]))
        transposed = problem["layout"] == "column"
        launch = self.compile_spec(problem, config).bind((programs,))

        def run(x: torch.Tensor) -> torch.Tensor:
            shape = x.shape[::-1] if transposed else x.shape
            out = empty(shape, dtype=x.dtype, device=x.device)
            if programs:
                launch(x, out)
            return out.t() if transposed else out

        return run
