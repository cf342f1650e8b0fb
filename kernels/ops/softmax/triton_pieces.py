"""What the Triton softmax kernels share: counts, rules and the description of a launch. Triton is not needed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_rules import (
    BLOCK_THREADS,
    MAX_ACCUMULATORS,
    MAX_INT32,
    NEEDS_GPU,
    compute_capability,
)

#: The largest block of a row that one program holds.
MAX_BLOCK = 65536
#: Bytes of the smallest piece that a GPU reads from memory.
SECTOR_BYTES = 32

Count = Callable[[Problem, Columns], np.ndarray]

BFLOAT16_CONVERTS = Rule(
    "dtype-supported",
    "conversions to bfloat16 begin with compute capability 8.0",
    check=lambda problem, columns, device: (
        problem.dtype != "bfloat16"
        or device.vendor != "nvidia"
        or compute_capability(device.architecture) >= 80
    ),
    explain=lambda problem, columns, device: f"{problem.dtype} on {device.architecture}",
)
ROWS_ADJACENT = Rule(
    "rows-adjacent",
    "neighbouring threads read neighbouring elements of a row; in a transposed matrix each would fetch a piece of memory "
    "of its own",
    check=lambda problem, columns, device: problem["layout"] == "row",
    explain=lambda problem, columns, device: f"layout={problem['layout']}",
)


def padded_columns(problem: Problem) -> int:
    """The power of two that a whole row is padded to."""
    return 1 << (int(problem["columns"]) - 1).bit_length()


def threads(columns: Columns, device: Device) -> np.ndarray:
    """Threads of one program."""
    return max(device.warp_size, 1) * columns["num_warps"]


def registers_rule(elements: Count, held: int) -> Rule:
    """At most :data:`MAX_ACCUMULATORS` float32 values a thread, where a program holds each element ``held`` times."""

    def values(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
        return held * elements(problem, columns) / threads(columns, device)

    return Rule(
        "registers",
        f"a thread has 255 registers: more than {MAX_ACCUMULATORS} values held at once leave too few and spill to memory",
        check=lambda problem, columns, device: values(problem, columns, device) <= MAX_ACCUMULATORS,
        explain=lambda problem, columns, device: (
            f"{values(problem, columns, device)[0]:g} > {MAX_ACCUMULATORS} values a thread"
        ),
    )


def threads_busy_rule(elements: Count) -> Rule:
    """Every thread has an element; a single warp is always allowed."""
    return Rule(
        "threads-busy",
        "with more threads than elements of a program some have nothing to do, and a single warp is the fewest",
        check=lambda problem, columns, device: (
            (columns["num_warps"] == 1) | (elements(problem, columns) >= threads(columns, device))
        ),
        explain=lambda problem, columns, device: (
            f"{elements(problem, columns)[0]} elements for {threads(columns, device)[0]} threads"
        ),
    )


def programs_rule(programs: Count) -> Rule:
    """What the first dimension of a grid holds."""
    return Rule(
        "grid",
        "the first dimension of a grid holds at most 2**31 - 1 blocks",
        check=lambda problem, columns, device: programs(problem, columns) <= MAX_INT32,
        explain=lambda problem, columns, device: f"{programs(problem, columns)[0]} blocks",
    )


#: The rules of every Triton softmax; variants add their own.
COMMON_RULES = (NEEDS_GPU, BFLOAT16_CONVERTS, BLOCK_THREADS)


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
