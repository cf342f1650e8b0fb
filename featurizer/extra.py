"""Features that one operation needs beyond the general ones."""

from __future__ import annotations

import numpy as np

from kernelcast.kernels import Block, Device, Problem

#: Output tiles that vendor libraries commonly choose among.
_LIBRARY_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256))


def left_out(operation: str) -> frozenset[str]:
    """General columns that an operation does without.

    gemm: what matters of a size's alignment is the alignment of the rows in memory. Where rows are adjacent the two are
    one fact, and trees would take either; on a padded matrix (an odd m stored every 50304 elements) only the latter holds.
    """
    if operation != "gemm":
        return frozenset()
    return frozenset({"alignment_m", "alignment_n", "alignment_k", "option_lda", "option_ldb"})


def extra_names(operation: str) -> dict[str, str]:
    """Names and units of the extra columns of an operation."""
    if operation != "gemm":
        return {}
    names = {f"row_alignment_{name}": "log2 bytes" for name in ("a", "b", "c")}
    names |= {"row_alignment": "log2 bytes", "remainder_k": "log2", "tall": "log2"}
    names |= {f"library_tail_{rows}x{columns}": "1" for rows, columns in _LIBRARY_TILES}
    return names


def extra_features(
    problem: Problem, block: Block, work: dict[str, np.ndarray], device: Device
) -> list[np.ndarray | float]:
    """The extra columns of an operation, in the order of :func:`extra_names`.

    gemm: how wide the loads of A, B and the stores of C can be, and the worst of them up to 16 bytes (vendor libraries
    and asynchronous copies need 16); whether a tile divides k; how tall the output is; and for each tile that a library
    may choose the slots of the waves over the useful work.

    A library asks whether rows start at aligned addresses. A compiled tile also has to know that a row's length is a
    multiple of the load, or the compiler cannot widen loads whose index wraps or is masked there. Where rows are adjacent
    that is one number; on a padded matrix (an odd m stored every 50304 elements) the library is fast and the tile slow.
    """
    if problem.operation != "gemm":
        return []
    m, n, k = problem["m"], problem["n"], problem["k"]
    layout = problem["layout"]
    lda = problem["lda"] or (m if layout[0] == "t" else k)
    ldb = problem["ldb"] or (k if layout[1] == "t" else n)
    element = float(problem.element_bytes.bit_length() - 1)
    rows = ((lda, m if layout[0] == "t" else k), (ldb, k if layout[1] == "t" else n), (n, n))
    compiled = block.variant.startswith("triton")
    rows_aligned = [
        min(min(alignment(step), alignment(length)) if compiled else alignment(step), 7.0 - element) + element
        for step, length in rows
    ]
    values: list[np.ndarray | float] = [
        *rows_aligned,
        min(*rows_aligned, 4.0),
        min(alignment(k), 6.0),
        float(np.log2(max(m, 1) / max(n, 1))),
    ]
    for tile_m, tile_n in _LIBRARY_TILES:
        tiles = -(-m // tile_m) * -(-n // tile_n)
        slots = -(-tiles // device.cores) * device.cores
        values.append(slots * tile_m * tile_n / max(m * n, 1))
    return values


def alignment(size: int) -> float:
    """log2 of the largest power of two that divides a size, at most 8."""
    return float(min((size & -size).bit_length() - 1, 8)) if size else 8.0
