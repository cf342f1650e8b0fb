"""Counts and rules that Triton kernels over the rows of a matrix share. Triton itself is not needed here.

The problems have the dimensions rows and columns; a program works on whole rows, or on one row in blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import (
    BLOCK_THREADS,
    MAX_ACCUMULATORS,
    MAX_INT32,
    NEEDS_GPU,
    compute_capability,
)

#: The largest block of a row that one program holds.
MAX_BLOCK = 65536
#: Triton knows that a row is aligned where its length is a multiple of so many elements.
ALIGNED_ELEMENTS = 16
#: Bytes of the widest load of one thread.
LOAD_BYTES = 16
#: float32 values that warps exchange at once in a reduction; twice as many on gfx950.
EXCHANGED_AT_ONCE = 32

Count = Callable[[Problem, Columns], np.ndarray]


def padded_columns(problem: Problem) -> int:
    """The power of two that a whole row is padded to."""
    return 1 << (int(problem["columns"]) - 1).bit_length()


def threads(columns: Columns, device: Device) -> np.ndarray:
    """Threads of one program."""
    return max(device.warp_size, 1) * columns["num_warps"]


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
#: The rules of every kernel over rows; variants add their own.
COMMON_RULES = (NEEDS_GPU, BFLOAT16_CONVERTS, BLOCK_THREADS)

#: For kernels that hold a whole row.
ROW_FITS = Rule(
    "row-fits-a-program",
    f"a program holds its row padded to a power of two, at most {MAX_BLOCK} elements",
    check=lambda problem, columns, device: problem["columns"] <= MAX_BLOCK,
    explain=lambda problem, columns, device: f"columns={problem['columns']}",
)
#: For kernels with the parameter ``rows_per_program``.
ROWS_ENOUGH = Rule(
    "rows-enough",
    "a program of more rows than there are computes padding",
    check=lambda problem, columns, device: columns["rows_per_program"] <= problem["rows"],
    explain=lambda problem, columns, device: (
        f"rows_per_program={columns['rows_per_program'][0]}, rows={problem['rows']}"
    ),
)
#: For kernels with the parameter ``block``, the columns of one step.
BLOCK_IS_A_PART = Rule(
    "block-is-a-part",
    "a block of all columns is the triton_row variant, which reads its row once",
    check=lambda problem, columns, device: columns["block"] < problem["columns"],
    explain=lambda problem, columns, device: f"block={columns['block'][0]}, columns={problem['columns']}",
)
OFFSETS = Rule(
    "offsets",
    "elements of a row are counted in 32 bits, the last block's padding included",
    check=lambda problem, columns, device: problem["columns"] + columns["block"] <= MAX_INT32,
    explain=lambda problem, columns, device: f"columns={problem['columns']}",
)


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


def rows_reduction_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of a reduction over each of ``rows_per_program`` whole rows of a row-major matrix.

    The threads of a warp are laid along a row, several elements each where loads may be wide, and warps follow until the
    row is covered; further warps take further rows. The warps of a row exchange one float32 for each row, and at most
    :data:`EXCHANGED_AT_ONCE` at a time; a warp that has its rows for itself needs no memory.
    """
    block, warp_size = padded_columns(problem), max(device.warp_size, 1)
    rows, warps = columns["rows_per_program"], columns["num_warps"]
    wide = LOAD_BYTES // problem.element_bytes if problem["columns"] % ALIGNED_ELEMENTS == 0 else 1
    each = np.clip(rows * block // threads(columns, device), 1, wide)
    along_row = np.minimum(warps, -(-block // (each * warp_size)))
    groups = np.maximum(warps // along_row, 1)
    at_once = EXCHANGED_AT_ONCE * (2 if device.architecture.startswith("gfx95") else 1)
    exchanged = np.minimum(-(-rows // groups) * along_row, at_once)
    return np.where(along_row > 1, 4.0 * groups * exchanged, 0.0)
