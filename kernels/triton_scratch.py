"""Shared memory in which a Triton matrix product rearranges its output before it is stored.

A product leaves its accumulators spread over the threads of a block as the matrix unit wants them; a store wants whole
rows. The compiler moves the tile through shared memory, in parts where it can: a bit of the tile's index that numbers a
register on both sides need not move, unless it is one of those that a single access takes. So the two layouts decide. They
are those that Triton 3.9 chooses; what an access takes was fitted to what it compiles for sm80, sm90 and sm100.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Bits of the lane's number.
_LANE_BITS = 5
#: An access is of 16 bytes at most.
_ACCESS_BYTES = 16
#: What tensor memory (sm100) gives at once takes a quarter of the tile, or so many bytes.
_FROM_TENSOR_MEMORY_BYTES = 8192


@dataclass(frozen=True, slots=True)
class OutputTile:
    """Output tiles of many candidates.

    Attributes:
        block_m: rows, powers of two.
        block_n: columns, powers of two.
        num_warps: warps of a block, powers of two.
        element_bytes: 2 or 4.
        aligned: whether the compiler knows that rows of the output start at multiples of 16 elements.
        warp_groups: where four warps multiply together (``wgmma``, ``tcgen05``), and not each alone (``mma.sync``).
        stores_matrices: whether the chip stores 8 x 8 matrices of 16-bit elements at once (``stmatrix``, from sm90 on).
    """

    block_m: np.ndarray
    block_n: np.ndarray
    num_warps: np.ndarray
    element_bytes: int
    aligned: bool
    warp_groups: np.ndarray
    stores_matrices: bool


def scratch_bytes(tile: OutputTile) -> np.ndarray:
    """Bytes in which tiles are rearranged that ``mma.sync`` or ``wgmma`` computed."""
    m, n, w = (np.log2(each).astype(np.int64) for each in (tile.block_m, tile.block_n, tile.num_warps))
    access = _log2(_ACCESS_BYTES // tile.element_bytes)
    # The store: the elements of an access, then lanes and warps along a row, and what is left of them down the rows.
    own = np.minimum(access if tile.aligned else 0, n)
    lanes = np.minimum(_LANE_BITS, n - own)
    across = np.minimum(w, n - own - lanes)
    first_row = _LANE_BITS - lanes + w - across
    # The product: a warp has 16 rows of 8 columns; a thread two neighbours of a row, and the same eight rows below.
    down, beside = _warps_of_mma(m, n, w)
    down = np.where(tile.warp_groups, np.where(m > 6, w, np.minimum(w, 2)), down)
    beside = np.where(tile.warp_groups, w - down, beside)
    common = (
        (own > 0).astype(np.int64)
        + np.maximum(n - np.maximum(own + lanes + across, 3 + beside), 0)
        + ((first_row <= 3) & (m > 3))
        + np.maximum(m - np.maximum(first_row, 4 + down), 0)
    )
    taken = np.full(len(m), access)
    if tile.element_bytes == 2:
        # Instructions that move 8 x 8 matrices take a pair of neighbours from a register, or a column. Older chips only
        # load so, and do where it saves enough.
        if tile.aligned:
            loads = np.where(beside == 0, n > 3, (n == 8) & (n - 3 - beside >= 3))
            taken = np.where(tile.stores_matrices | loads, 1, access)
        else:
            taken = np.where(tile.stores_matrices & (first_row == 0), 0, access)
    whole = float(tile.element_bytes) * tile.block_m * tile.block_n
    moved = whole / 2.0 ** np.maximum(common - taken, 0)
    if tile.element_bytes == 2 and tile.aligned:
        return np.where(tile.num_warps == 1, 0.0, moved)  # a single warp exchanges registers
    return moved


def tensor_memory_scratch_bytes(tile: OutputTile) -> np.ndarray:
    """Bytes in which tiles are rearranged that ``tcgen05`` computed, at most."""
    whole = float(tile.element_bytes) * tile.block_m * tile.block_n
    if not tile.aligned:
        return whole if tile.element_bytes == 2 else scratch_bytes(tile)
    return np.maximum(whole / 4, np.minimum(whole, _FROM_TENSOR_MEMORY_BYTES))


def _warps_of_mma(m: np.ndarray, n: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log2 warps down, log2 warps across) a tile: each next doubling goes where more instructions are left."""
    down, across = np.zeros_like(w), np.zeros_like(w)
    for _ in range(int(w.max(initial=0))):
        left = down + across < w
        rows_left, columns_left = np.maximum(m - 4, 0) - down, np.maximum(n - 3, 0) - across
        goes_down = (rows_left >= columns_left) & (rows_left > 0)
        down = down + (left & goes_down)
        across = across + (left & ~goes_down)
    return down, across


def _log2(power: int) -> int:
    return power.bit_length() - 1
