"""What the ranker says of a few candidates at every cell of a plan's grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kernelcast.kernels import Candidate, CandidateTable
from kernelcast.runtime.plan_axes import Grid

if TYPE_CHECKING:
    from kernelcast.runtime.selector import Ranking

Sizes = tuple[int, ...]

#: The first few of each cell's ranking may contend.
_LEADERS = 4

#: A predicted gain below a quarter of its standard error is real in 6 of 10 cases (the normal distribution at 0.25 is
#: 0.6): a coin's toss, for which no interval begins.
_DOUBT = 0.25

#: A regret within the threshold counts for so little that it only orders candidates that are equal otherwise.
_FAINT = 1e-3


class Scores:
    """Predicted log latencies of the contenders, by sizes.

    The rankings of the first grid choose the contenders (:meth:`nominate`), and are let go then.

    Args:
        rank: the ranking of some sizes.
        default: the candidate that is always legal, always the first contender.
    """

    def __init__(self, rank: Callable[[Sizes], Ranking], default: Candidate) -> None:
        self._rank = rank
        self._rankings: dict[Sizes, Ranking] = {}
        self._found: dict[Sizes, tuple[np.ndarray, np.ndarray]] = {}
        self.contenders: tuple[Candidate, ...] = (default,)
        self.source = ""
        self.model_version = ""
        self.reason = ""

    def nominate(self, cells: Iterable[tuple[Sizes, float]], most: int) -> None:
        """Choose at most so many contenders: those that lead in the most cells, by weight; of equals those of the smaller sizes."""
        votes: dict[Candidate, float] = {}
        for sizes, weight in cells:
            ranking = self._ranking(sizes)
            rows = [int(row) for row in ranking.order()[:_LEADERS] if ranking.prediction.covered[row]]
            for place, row in enumerate(rows):
                candidate = ranking.table[row]
                votes[candidate] = votes.get(candidate, 0.0) + weight * (1.0 if place == 0 else 0.2)
        default = self.contenders[0]
        others = sorted((c for c in votes if c != default), key=lambda c: -votes[c])
        self.contenders = (default, *others[: most - 1])
        for sizes in list(self._rankings):
            self.logs(sizes)
        self._rankings.clear()

    def logs(self, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
        """(log latency, how far it is in doubt) of each contender; NaN where it is not legal, or not known to the ranker.

        A default of which it knows nothing counts as slow as the slowest that it knows.
        """
        found = self._found.get(sizes)
        if found is None:
            ranking = self._ranking(sizes)
            rows = rows_of(ranking.table, self.contenders)
            known = (rows >= 0) & np.append(ranking.prediction.covered, False)[rows]
            found = (
                np.where(known, np.append(ranking.prediction.log_latency, np.nan)[rows], np.nan),
                np.where(known, _DOUBT * np.append(ranking.prediction.error_log, np.nan)[rows], np.nan),
            )
            if not known[0]:
                all_known = ranking.prediction.log_latency[ranking.prediction.covered]
                found[0][0] = all_known.max() if len(all_known) else 0.0
                found[1][0] = 0.0
            self._found[sizes] = found
            self._rankings.pop(sizes, None)
        return found

    def on(self, grid: Grid) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`logs` at every cell: [*cells, contenders]. NaN in cells without sizes."""
        logs = np.full((*grid.shape, len(self.contenders)), np.nan)
        doubt = np.full_like(logs, np.nan)
        for cell in grid.cells():
            sizes = grid.least(cell)
            if sizes is not None:
                logs[cell], doubt[cell] = self.logs(sizes)
        return logs, doubt

    def _ranking(self, sizes: Sizes) -> Ranking:
        found = self._rankings.get(sizes)
        if found is None:
            found = self._rankings[sizes] = self._rank(sizes)
            # The reason of one ranking is that of all, unless a model fails on some sizes.
            if not self.source or found.source != "predicted":
                self.source, self.model_version = found.source, found.model_version
                self.reason = found.reason
        return found


def rows_of(table: CandidateTable, candidates: Sequence[Candidate]) -> np.ndarray:
    """The row of each candidate in a table, int64; -1 where it is not there."""
    rows = np.full(len(candidates), -1)
    start = 0
    for block in table.blocks:
        for place, candidate in enumerate(candidates):
            if candidate.variant != block.variant or len(candidate.config) != len(block.columns):
                continue
            same = np.ones(block.length, dtype=bool)
            for name, value in candidate.config:
                same &= block.columns[name] == value if name in block.columns else False
            if same.any() and rows[place] < 0:
                rows[place] = start + int(same.argmax())
        start += block.length
    return rows


def costs(logs: np.ndarray, doubt: np.ndarray, weights: np.ndarray, least_gain: float) -> np.ndarray:
    """What choosing each contender costs in each cell: [*cells, contenders], infinite where it is not legal.

    That is the cell's weight times the regret: the log latency less that of the cell's best. A regret within the
    threshold is no reason for another interval, so it counts next to nothing; and a default within it counts nothing,
    so that it stands where nothing is clearly faster. The threshold is ``least_gain``, or ``doubt`` where that is more.
    """
    filled = np.where(np.isnan(logs), np.inf, logs)
    best = filled.min(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        regret = filled - best
    within = regret <= np.fmax(math.log1p(least_gain), doubt)
    counted = np.where(within, _FAINT * np.where(np.isfinite(regret), regret, 0.0), regret)
    counted[..., 0] = np.where(within[..., 0], 0.0, counted[..., 0])
    cost = weights[..., None] * np.where(np.isfinite(counted), counted, 0.0)
    cost[~np.isfinite(counted) & (weights[..., None] > 0)] = np.inf
    return cost
