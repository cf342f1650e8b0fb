"""What the Triton softmax kernels share: counts, rules and the description of a launch. Triton is not needed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_row_rules import (
    BLOCK_IS_A_PART,
    COMMON_RULES,
    MAX_BLOCK,
    OFFSETS,
    ROW_FITS,
    ROWS_ENOUGH,
    padded_columns,
    programs_rule,
    registers_rule,
    threads,
    threads_busy_rule,
)

__all__ = [
    "BLOCK_IS_A_PART",
    "COMMON_RULES",
    "MAX_BLOCK",
    "OFFSETS",
    "ROWS_ADJACENT",
    "ROWS_ENOUGH",
    "ROW_FITS",
    "SECTOR_BYTES",
    "matrix_pointers",
    "padded_columns",
    "programs_rule",
    "reduction_bytes",
    "registers_rule",
    "row_spec",
    "threads",
    "threads_busy_rule",
]

#: Bytes of the smallest piece that a GPU reads from memory.
SECTOR_BYTES = 32

ROWS_ADJACENT = Rule(
    "rows-adjacent",
    "neighbouring threads read neighbouring elements of a row; in a transposed matrix each would fetch a piece of memory "
    "of its own",
    check=lambda problem, columns, device: problem["layout"] == "row",
    explain=lambda problem, columns, device: f"layout={problem['layout']}",
)


def reduction_bytes(rows: np.ndarray | int, columns: Columns) -> np.ndarray:
    """Shared memory of a reduction over the columns: one float32 for each row and warp; none where a warp is alone."""
    return np.where(columns["num_warps"] > 1, 4.0 * rows * columns["num_warps"], 0.0)


def matrix_pointers(problem: Problem) -> dict[str, Pointer]:
    """The pointers to input and output, as the kernels name them."""
    stored = problem["rows"] * problem["columns"] * problem.element_bytes
    return {"x_ptr": Pointer(problem.dtype, stored), "out_ptr": Pointer(problem.dtype, stored)}


def row_spec(kernel: Any, problem: Problem, config: Mapping[str, Any], block: int) -> KernelSpec:
    """A kernel of one row a program, with all that its compilation depends on."""
    return KernelSpec(
        kernel=kernel,
        tensors=matrix_pointers(problem),
        integers={"columns": problem["columns"]},
        constants={"BLOCK": block, "EVEN": problem["columns"] % block == 0},
        options=launch_options(config),
    )
