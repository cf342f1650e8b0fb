"""Cutting a grid of cells into few boxes, each with one candidate: the optimum of a sum, by dynamic programming.

The boxes are nested slabs: the first axis is cut into runs, each run of the second into runs of its own, and so on. Among
all such partitions the one returned has the least sum of costs, where each box costs a penalty besides. It depends on
nothing but the numbers, so equal costs give an equal partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Sums closer than this are equal: prefix sums differ in their last digits.
_DIGITS = 12


@dataclass(frozen=True)
class Box:
    """A box of cells with one candidate.

    Attributes:
        cells: (first, end) of each axis, the end not included.
        choice: the candidate's place.
    """

    cells: tuple[tuple[int, int], ...]
    choice: int


def partition(cost: np.ndarray, penalty: float) -> list[Box]:
    """The cheapest partition into boxes.

    Args:
        cost: [axis 1, ..., axis d, candidates]: what each candidate costs in each cell; infinite where it may not be
            chosen. One candidate at least must be finite in every cell. Of equal candidates the first is chosen.
        penalty: of each box, above 0: so neighbours with the same candidate are one box.

    Returns:
        The boxes in the order of their first cells. Every cell is in exactly one.
    """
    return _solve(cost, penalty)[1]


def _solve(cost: np.ndarray, penalty: float) -> tuple[float, list[Box]]:
    if cost.ndim == 2:
        return _line(cost, penalty)
    count = cost.shape[0]
    best = np.full((count + 1, count + 1), np.inf)
    slabs: dict[tuple[int, int], np.ndarray] = {}
    for first in range(count):
        sums = np.cumsum(cost[first:], axis=0)
        slabs |= {(first, first + 1 + place): slab for place, slab in enumerate(sums)}
        # The slabs of two axes are lines, of which all that begin here are solved together.
        best[first, first + 1 :] = (
            _totals(sums, penalty) if cost.ndim == 3 else [_solve(slab, penalty)[0] for slab in sums]
        )
    total, runs = _runs(best)
    return total, [
        Box(((first, end), *box.cells), box.choice)
        for first, end in runs
        for box in _solve(slabs[first, end], penalty)[1]
    ]


def _line(cost: np.ndarray, penalty: float) -> tuple[float, list[Box]]:
    """One axis: [cells, candidates]."""
    of_run = _of_runs(cost[None])[0]
    choice = of_run.argmin(axis=2)
    best = np.take_along_axis(of_run, choice[:, :, None], axis=2)[:, :, 0] + penalty
    total, runs = _runs(best)
    return total, [Box(((first, end),), int(choice[first, end])) for first, end in runs]


def _totals(cost: np.ndarray, penalty: float) -> np.ndarray:
    """What the cheapest cut of each of several lines costs: [lines, cells, candidates] -> [lines]."""
    best = _of_runs(cost).min(axis=3) + penalty
    total = np.zeros((len(cost), cost.shape[1] + 1))
    for end in range(1, total.shape[1]):
        total[:, end] = (total[:, :end] + best[:, :end, end]).min(axis=1)
    return np.round(total[:, -1], _DIGITS)


def _of_runs(cost: np.ndarray) -> np.ndarray:
    """What each candidate costs over each run of cells, first and end: [lines, cells + 1, cells + 1, candidates]."""
    allowed = np.isfinite(cost)
    none = np.zeros((len(cost), 1, cost.shape[2]))
    sums = np.concatenate([none, np.cumsum(np.where(allowed, cost, 0.0), axis=1)], axis=1)
    barred = np.concatenate([none, np.cumsum(~allowed, axis=1)], axis=1)
    of_run = np.round(sums[:, None] - sums[:, :, None], _DIGITS)
    of_run[(barred[:, None] - barred[:, :, None]) != 0] = np.inf
    return of_run


def _runs(best: np.ndarray) -> tuple[float, list[tuple[int, int]]]:
    """The cheapest cut of 0 .. n into runs, where run (first, end) costs ``best[first, end]``; of equals the fewest."""
    count = len(best) - 1
    total = np.full(count + 1, np.inf)
    total[0] = 0.0
    start = [0] * (count + 1)
    for end in range(1, count + 1):
        sums = np.round(total[:end] + best[:end, end], _DIGITS)
        start[end] = int(sums.argmin())
        total[end] = sums[start[end]]
    runs, end = [], count
    while end:
        runs.append((start[end], end))
        end = start[end]
    return float(total[count]), runs[::-1]
