"""What the Triton variants of batched_gemm share. Triton itself is not needed here."""

from __future__ import annotations

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import Pointer
from kernelcast.kernels.ops.batched_gemm.schema import batch_strides, copies, output_elements
from kernelcast.kernels.ops.gemm.triton_tiled import operand_pointers, operand_strides
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import GRID, MATMUL_RULES, MAX_INT32, tiles


def programs(problem: Problem, columns: Columns) -> np.ndarray:
    """Programs of one slice of k: tiles of C times the batch, as floats, which hold what 64-bit integers do not."""
    along_m, along_n, _ = tiles(problem, columns)
    return np.asarray(float(problem["batch"]) * along_m * along_n)


BATCHED_GRID = Rule(
    "grid",
    "the batch takes turns with the tiles in the first dimension of a grid, which holds at most 2**31 - 1 blocks (the "
    "others hold 65535)",
    check=lambda problem, columns, device: programs(problem, columns) <= MAX_INT32,
    explain=lambda problem, columns, device: f"{programs(problem, columns)[0]:.0f} blocks",
)
#: The rules of every tiled product of a batch.
BATCHED_RULES = (*(rule for rule in MATMUL_RULES if rule is not GRID), BATCHED_GRID)


def input_pointers(problem: Problem) -> dict[str, Pointer]:
    """The pointers to all matrices of A and of B, as the kernels name them."""
    counts = copies(problem)
    return {
        name: Pointer(pointer.dtype, count * pointer.storage_bytes)
        for (name, pointer), count in zip(operand_pointers(problem).items(), counts, strict=True)
    }


def output_pointer(problem: Problem) -> dict[str, Pointer]:
    """The pointer to the output."""
    return {"c_ptr": Pointer(problem.dtype, output_elements(problem) * problem.element_bytes)}


def sizes_and_strides(problem: Problem) -> dict[str, int]:
    """The sizes of one product and all strides of A and B, as the kernels name them, in their order."""
    of_a, of_b = batch_strides(problem)
    return {
        "M": problem["m"],
        "N": problem["n"],
        "K": problem["k"],
        "batch_stride_a": of_a,
        "batch_stride_b": of_b,
        **operand_strides(problem),
    }
