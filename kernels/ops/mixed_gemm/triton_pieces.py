"""What the Triton variants of mixed_gemm share: their rules, the quick configs, the pointers and the traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import Pointer
from kernelcast.kernels.ops.gemm.triton_tiled import TILE_PARAMETERS, tile_constants
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import MATMUL_RULES, MAX_INT32, compute_capability, operands, tiles

#: gemm's, and one longer step of k: as 8-bit integers it takes the bytes of half as many 16-bit numbers.
MIXED_TILE_PARAMETERS = tuple(
    replace(parameter, values=(*parameter.values, 256)) if parameter.name == "block_k" else parameter
    for parameter in TILE_PARAMETERS
)

# (block_m, block_k, block_n, num_stages, num_warps), the order of PyTorch's names; group_m is 8, as in PyTorch.
# All that won a problem of the AutoHeuristic collection, of 54 tried.
RECORDED_WINNERS = (
    (16, 64, 64, 3, 4),
    (16, 64, 128, 5, 8),
    (16, 128, 32, 2, 2),
    (16, 128, 32, 5, 2),
    (16, 128, 64, 5, 4),
    (16, 128, 128, 4, 4),
    (16, 256, 128, 3, 4),
    (16, 256, 128, 5, 8),
    (32, 128, 32, 2, 4),
    (32, 128, 32, 5, 4),
    (32, 128, 64, 5, 4),
    (32, 128, 128, 4, 4),
    (64, 32, 64, 3, 4),
    (64, 32, 128, 3, 4),
    (64, 32, 128, 4, 8),
    (64, 64, 128, 3, 4),
    (64, 64, 128, 5, 8),
    (64, 128, 32, 5, 4),
    (64, 128, 64, 5, 4),
    (64, 128, 128, 4, 4),
    (128, 32, 128, 3, 4),
    (128, 64, 128, 3, 4),
)
# A short k, small tiles, long steps for few rows, and the wide tiles of many rows.
FURTHER_CONFIGS = (
    (16, 32, 32, 2, 1),
    (16, 32, 32, 5, 2),
    (16, 64, 32, 4, 2),
    (16, 256, 32, 3, 4),
    (16, 256, 64, 3, 4),
    (16, 256, 64, 5, 8),
    (32, 64, 64, 4, 4),
    (32, 64, 128, 4, 4),
    (32, 256, 64, 3, 4),
    (32, 256, 128, 3, 8),
    (64, 64, 32, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 256, 3, 8),
    (128, 32, 64, 3, 4),
    (128, 64, 64, 3, 4),
    (128, 64, 128, 4, 8),
    (128, 64, 128, 5, 8),
    (128, 64, 256, 3, 8),
    (128, 64, 256, 4, 8),
    (128, 128, 128, 3, 8),
    (256, 64, 128, 3, 8),
)


def named_configs(
    extra: Mapping[str, tuple[Any, ...]] | None = None, *, most_rows: int = MAX_INT32
) -> dict[str, np.ndarray]:
    """The quick subset as columns, of tiles of at most so many rows, crossed with every value of ``extra``."""
    rows = np.array(RECORDED_WINNERS + FURTHER_CONFIGS)
    rows = rows[rows[:, 0] <= most_rows]
    columns = {
        "block_m": rows[:, 0],
        "block_n": rows[:, 2],
        "block_k": rows[:, 1],
        "group_m": np.full(len(rows), 8),
        "num_warps": rows[:, 4],
        "num_stages": rows[:, 3],
    }
    for name, values in (extra or {}).items():
        count = len(next(iter(columns.values())))
        columns = {key: np.tile(column, len(values)) for key, column in columns.items()}
        columns[name] = np.repeat(np.array(values), count)
    return columns


def mixed_constants(
    problem: Problem, config: Mapping[str, Any], architecture: str, *, interpreted: bool
) -> dict[str, Any]:
    """The constants that the kernels of ``triton_tiled_jit`` share, in their order.

    Weights are widened by NVIDIA's instructions where the architecture is known to be NVIDIA's.
    """
    return {
        **tile_constants(problem, config, architecture, interpreted=interpreted),
        "BITS": compute_capability(architecture) > 0 and not interpreted,
    }


def launch_target() -> str:
    """The current GPU's architecture; ``""`` under the interpreter."""
    import triton

    if triton.knobs.runtime.interpret:
        return ""
    target = triton.runtime.driver.active.get_current_target()
    return f"sm{target.arch}" if target.backend == "cuda" else str(target.arch)


def mixed_pointers(problem: Problem) -> dict[str, Pointer]:
    """The pointers to A and B, as the kernels name them."""
    found = {}
    for operand, dtype in zip(operands(problem), (problem.dtype, str(problem["weight_dtype"])), strict=True):
        stored_rows = operand.columns if operand.transposed else operand.rows
        found[f"{operand.name}_ptr"] = Pointer(dtype, stored_rows * operand.leading * operand.element_bytes)
    return found


def mixed_traffic_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Bytes of A, read once for every column of tiles, of B, once for every row of tiles, of the scales and of C."""
    m, n, k = (float(problem[name]) for name in ("m", "n", "k"))
    tiles_m, tiles_n, _ = tiles(problem, columns)
    a, b = operands(problem)
    read = a.element_bytes * m * k * tiles_n + b.element_bytes * k * n * tiles_m
    return read + problem.element_bytes * (n * tiles_m + m * n)


SIXTEEN_BIT = Rule(
    "16-bit",
    "widened to float32 the weights take four times their bytes, and a product without tensor cores keeps them in "
    "registers, which spill by the kilobyte",
    check=lambda problem, columns, device: problem.element_bytes == 2,
    explain=lambda problem, columns, device: problem.dtype,
)

#: gemm's rules on tiles; variants add their own on shared memory.
MIXED_RULES = (MATMUL_RULES[0], SIXTEEN_BIT, *MATMUL_RULES[1:])
