"""Features that one operation needs beyond the general ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kernelcast.featurizer.tiles import TILE_UNITS, balance, tile_features
from kernelcast.kernels import Block, Device, Problem

#: Output tiles that vendor libraries commonly choose among.
_LIBRARY_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256))
#: General columns that say less than those of a tile.
_SPARED = frozenset(
    {
        "warps", "shared_bytes", "accumulators", "flops_waste", "traffic_reuse", "scratch_share", "calls", "programs", "inner_steps", "compute_us", "memory_us",
        "scratch_us", "launch_us", "blocks_per_core", "waves", "tail", "busy_share", "step_us", "roofline_us",
    }
)  # fmt: skip


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
    return {**names, "balance": "log2", **TILE_UNITS}


def estimate_place(names: Sequence[str], X: np.ndarray) -> int | None:
    """The column that estimates a candidate's time best, log2 and up to a constant of the problem; None if there is none.

    Args:
        names: of the columns.
        X: float32 [rows, columns].
    """
    for name in ("tile_estimate", "roofline_us"):
        if name in names and not np.isnan(X[:, names.index(name)]).all():
            return names.index(name)
    return None


def spared(names: Sequence[str], X: np.ndarray) -> list[int]:
    """Places of the columns that trees do better without, given rows that hold all columns of some names.

    Where every candidate whose grid is known has the columns of a tile, these say all that amounts of work and the roofline
    do, and say it in ratios; of amounts trees learn the shapes that they happened to see. Elsewhere nothing is spared.

    Args:
        names: of the columns.
        X: float32 [rows, columns].
    """
    if "tile_estimate" not in names or not len(X):
        return []
    tile, programs = (np.isnan(X[:, names.index(name)]) for name in ("tile_estimate", "programs"))
    if tile.all() or (tile & ~programs).any():
        return []
    return [place for place, name in enumerate(names) if name in _SPARED]


def extra_features(problem: Problem, block: Block, device: Device, out: np.ndarray) -> None:
    """Write the extra columns of an operation, in the order of :func:`extra_names`: float64 [columns, rows], NaN before.

    gemm: how wide the loads of A, B and the stores of C can be, and the worst of them up to 16 bytes (vendor libraries
    and asynchronous copies need 16); whether a tile divides k; how tall the output is; and for each tile that a library
    may choose the slots of the waves over the useful work; the arithmetic's time over the traffic's; and what
    :mod:`kernelcast.featurizer.tiles` says of tiles.

    A library asks whether rows start at aligned addresses. A compiled tile also has to know that a row's length is a
    multiple of the load, or the compiler cannot widen loads whose index wraps or is masked there. Where rows are adjacent
    that is one number; on a padded matrix (an odd m stored every 50304 elements) the library is fast and the tile slow.
    """
    if problem.operation != "gemm":
        return
    key = "gemm features", device.cores
    found = problem.derived.get(key)
    if found is None:
        found = problem.derived[key] = _of_gemm(problem, device)
    of_problem = found[int(block.variant.startswith("triton"))]
    out[: len(of_problem)] = of_problem
    tile_features(problem, block, device, out[len(of_problem) :])


def _of_gemm(problem: Problem, device: Device) -> np.ndarray:
    """float64 [2, columns, 1]: for a library, and for a compiled tile."""
    m, n, k = problem["m"], problem["n"], problem["k"]
    layout = problem["layout"]
    lda = problem["lda"] or (m if layout[0] == "t" else k)
    ldb = problem["ldb"] or (k if layout[1] == "t" else n)
    element = float(problem.element_bytes.bit_length() - 1)
    most = 7.0 - element
    row_n = min(alignment(n), most) + element
    row_a, row_b = min(alignment(lda), most) + element, min(alignment(ldb), most) + element
    tiled_a = min(row_a, alignment(m if layout[0] == "t" else k) + element)
    tiled_b = min(row_b, alignment(k if layout[1] == "t" else n) + element)
    area, cores = (m * n) or 1, device.cores
    shared = [min(alignment(k), 6.0), math.log2((m or 1) / (n or 1))]
    for tile_m, tile_n in _LIBRARY_TILES:
        turns = -(-(-(-m // tile_m) * -(-n // tile_n)) // cores)
        shared.append(turns * cores * tile_m * tile_n / area)
    shared.append(balance(problem, device))
    library = [row_a, row_b, row_n, min(row_a, row_b, row_n, 4.0), *shared]
    tiled = [tiled_a, tiled_b, row_n, min(tiled_a, tiled_b, row_n, 4.0), *shared]
    return np.array([library, tiled])[:, :, None]


def alignment(size: int) -> float:
    """log2 of the largest power of two that divides a size, at most 8."""
    return float(min((size & -size).bit_length() - 1, 8)) if size else 8.0
