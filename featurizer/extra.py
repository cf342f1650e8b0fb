"""Features that one operation needs beyond the general ones."""

from __future__ import annotations

import numpy as np

from kernelcast.kernels import Block, Device, Problem

#: Output tiles that vendor libraries commonly choose among.
_LIBRARY_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256))


def extra_names(operation: str) -> dict[str, str]:
    """Names and units of the extra columns of an operation."""
    if operation != "gemm":
        return {}
    names = {"lda_alignment": "log2", "ldb_alignment": "log2", "tall": "log2"}
    names |= {f"library_tail_{rows}x{columns}": "1" for rows, columns in _LIBRARY_TILES}
    return names


def extra_features(
    problem: Problem, block: Block, work: dict[str, np.ndarray], device: Device
) -> list[np.ndarray | float]:
    """The extra columns of an operation, in the order of :func:`extra_names`.

    gemm: how the rows in memory are aligned (a library picks other kernels where 16-byte loads are not possible), how
    tall the output is, and for each tile that a library may choose the slots of the waves over the useful work.
    """
    if problem.operation != "gemm":
        return []
    m, n, k = problem["m"], problem["n"], problem["k"]
    layout = problem["layout"]
    lda = problem["lda"] or (m if layout[0] == "t" else k)
    ldb = problem["ldb"] or (k if layout[1] == "t" else n)
    values: list[np.ndarray | float] = [alignment(lda), alignment(ldb), float(np.log2(max(m, 1) / max(n, 1)))]
    for rows, columns in _LIBRARY_TILES:
        tiles = -(-m // rows) * -(-n // columns)
        slots = -(-tiles // device.cores) * device.cores
        values.append(slots * rows * columns / max(m * n, 1))
    return values


def alignment(size: int) -> float:
    """log2 of the largest power of two that divides a size, at most 8."""
    return float(min((size & -size).bit_length() - 1, 8)) if size else 8.0
