"""Cutting the sizes of a plan into intervals: by the forecast, by what was measured, and by the rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, operation, variants
from kernelcast.runtime.plan_axes import MODULI, Axis, Grid
from kernelcast.runtime.plan_family import Family, Sizes
from kernelcast.runtime.plan_partition import Box, partition
from kernelcast.runtime.plan_scores import Scores, costs
from kernelcast.runtime.plan_verify import Point, corrected

if TYPE_CHECKING:
    from kernelcast.runtime.selector import Ranking

#: An interval that holds so much of the range (in logarithms) must gain ``least_gain`` to be worth its line; a larger one
#: less, a smaller one more.
_SHARE = 1 / 64
#: The penalty is doubled until there are no more intervals than these.
_MOST_INTERVALS = 16
#: Borders are refined to so much of a size, while a dimension has fewer cells than these, by the number of dimensions.
_SHARP = {1: 1 / 64, 2: 1 / 8, 3: 1 / 4, 4: 1 / 2}
_MOST_CELLS = {1: 400, 2: 28, 3: 12, 4: 7}
_REFINEMENTS = 10
#: Candidates that contend, the default among them.
_MOST_CONTENDERS = {1: 40, 2: 16, 3: 10, 4: 8}
#: Up to so many sizes each is held against the rules; of more, three of each cell and dimension.
_MOST_PROVEN = 8192
#: After so many turns of barring cells, candidates that still break rules are barred from all.
_PATIENCE = 6


class Cutter:
    """Cuts the sizes of a family into boxes of the grid, each with one of the contenders.

    Args:
        family: of the problems.
        rank: the ranking of a problem.
        device: whose rules count.
        least_gain: below which a gain is none, as a ratio.

    Attributes:
        grid: the cells; it gets finer as borders are refined.
        scores: what is forecast of the contenders.
        hopeful: contenders that may be chosen before they were measured, while others are.
    """

    def __init__(
        self, family: Family, rank: Callable[[Problem], Ranking], device: Device, least_gain: float
    ) -> None:
        self.family = family
        self.device = device
        self.least_gain = least_gain
        self.default = operation(family.name).default
        self._rank_problem = rank
        self._variants = variants(family.name)
        #: (sizes, candidate) that may not be: the candidate is barred from the cell that they lie in.
        self._barred: set[tuple[Sizes, Candidate]] = set()
        #: Candidates whose rules no cells can tell: barred from all.
        self._banned: set[Candidate] = set()
        self._rules: dict[tuple[Sizes, Candidate], bool] = {}
        self.scores = Scores(self._rank, self.default)
        self.hopeful: set[int] = set()
        self.grid = self._first_grid()

    @property
    def proven(self) -> bool:
        """Whether every size is held against the rules."""
        return self.family.sizes <= _MOST_PROVEN

    def settle(self, points: list[Point]) -> list[Box]:
        """Cut, refine the borders and hold the result against the rules, until nothing changes."""
        turn = 0
        while True:
            turn += 1
            boxes = self._refined(points)
            illegal = self._illegal(boxes)
            if not illegal:
                return boxes
            self._barred |= illegal
            if turn % _PATIENCE == 0:
                self._banned |= {candidate for _, candidate in illegal}

    def bar(self, box: Box) -> None:
        """Never choose a box's candidate in its cells again."""
        candidate = self.scores.contenders[box.choice]
        cells = product(*(range(first, end) for first, end in box.cells))
        self._barred |= {(sizes, candidate) for cell in cells if (sizes := self.grid.least(cell)) is not None}

    def legal(self, sizes: Sizes, candidate: Candidate) -> bool:
        """Whether a candidate meets every rule at some sizes."""
        key = (sizes, candidate)
        if key not in self._rules:
            legal = self._variants[candidate.variant].legal(
                self.family.problem(sizes), self.device, _block(candidate)
            )
            self._rules[key] = bool(legal[0])
        return self._rules[key]

    def middle(self, box: Box) -> Sizes:
        """The sizes in the middle of a box, in logarithms, of the highest class in it that has some."""
        found = []
        count = len(self.grid.axes)
        for place, axis in enumerate(self.grid.axes):
            first, end = box.cells[count + place]
            low, high = axis.edges[first], axis.last(end)
            wanted = math.sqrt(low * high)
            classes = range(*box.cells[place])
            members = [
                size
                for cell in range(first, end)
                for of_class in classes
                if (size := axis.least(cell, of_class)) is not None
            ]
            # Cells may be wide: any size near the middle will do, best one that is a multiple of much.
            near = [
                size
                for size in axis.sizes[_place(axis, wanted) : _place(axis, wanted) + 2 * MODULI[-1]]
                if size <= high and axis.class_of(size) in classes
            ]
            best = near or members or [axis.sizes[_place(axis, low)]]
            found.append(max(best, key=lambda size: (axis.class_of(size), -abs(math.log(size / wanted)))))
        return tuple(found)

    # --- The grid ---

    def _rank(self, sizes: Sizes) -> Ranking:
        return self._rank_problem(self.family.problem(sizes))

    def _first_grid(self) -> Grid:
        """A coarse grid, with the classes of alignment that the forecast tells apart, and its contenders nominated."""
        moduli: dict[str, tuple[int, ...]] = dict.fromkeys(self.family.dynamic, MODULI)
        if len(self.family.dynamic) > 1:
            # Dimension by dimension: all classes of several at once would be dozens of grids.
            moduli = {name: self._moduli_of(name) for name in self.family.dynamic}
        axes = [Axis(name, sizes, moduli[name]) for name, sizes in self.family.dynamic.items()]
        for axis in axes:
            axis.spread(len(axes))
        grid = Grid(axes)
        weights = grid.weights()
        cells = [(grid.least(cell), float(weights[cell])) for cell in grid.cells()]
        self.scores.nominate(
            [(sizes, weight) for sizes, weight in cells if sizes is not None], _MOST_CONTENDERS[len(axes)]
        )
        if len(axes) == 1:
            kept = self._classes_used(axes[0], self._cut(grid, []))
            if kept != axes[0].moduli:
                axis = Axis(axes[0].name, axes[0].sizes, kept)
                for edge in axes[0].edges[1:]:
                    axis.cut(edge)
                grid = Grid([axis])
        return grid

    def _moduli_of(self, name: str) -> tuple[int, ...]:
        """The moduli that matter in one dimension, with the others in the middle of theirs."""
        middle = {other: sizes[len(sizes) // 2] for other, sizes in self.family.dynamic.items()}
        axis = Axis(name, self.family.dynamic[name])
        axis.spread(2)
        grid = Grid([axis])

        def rank(sizes: Sizes) -> Ranking:
            return self._rank(tuple({**middle, name: sizes[0]}[each] for each in self.family.dynamic))

        scores = Scores(rank, self.default)
        weights = grid.weights()
        cells = [(grid.least(cell), float(weights[cell])) for cell in grid.cells()]
        scores.nominate(
            [(sizes, weight) for sizes, weight in cells if sizes is not None], _MOST_CONTENDERS[1]
        )
        logs, doubt = scores.on(grid)
        boxes = partition(costs(logs, doubt, weights, self.least_gain), self._penalty)
        return self._classes_used(axis, boxes)

    @staticmethod
    def _classes_used(axis: Axis, boxes: list[Box]) -> tuple[int, ...]:
        """The moduli at which some box begins: those that told sizes apart."""
        return tuple(axis.moduli[start] for start in sorted({0, *(box.cells[0][0] for box in boxes)}))

    # --- Cutting ---

    @property
    def _penalty(self) -> float:
        return max(self.least_gain * _SHARE, 1e-9)

    def _cut(self, grid: Grid, points: list[Point]) -> list[Box]:
        logs, doubt = self.scores.on(grid)
        place = {candidate: number for number, candidate in enumerate(self.scores.contenders)}
        for candidate in self._banned:
            logs[..., place[candidate]] = np.nan
        for sizes, candidate in self._barred:
            logs[(*grid.cell_of(sizes), place[candidate])] = np.nan
        if points:
            logs, doubt = corrected(
                logs, grid, points, lambda sizes: self.scores.logs(sizes)[0], self.hopeful
            )
        # Those that may be chosen nowhere only cost time.
        chosen = np.flatnonzero(~np.isnan(logs).all(axis=tuple(range(logs.ndim - 1))))
        logs, doubt = logs[..., chosen], doubt[..., chosen]
        cost = costs(logs, doubt, grid.weights(), self.least_gain)
        penalty = self._penalty
        while len(boxes := partition(cost, penalty)) > _MOST_INTERVALS:
            penalty *= 2
        return [Box(box.cells, int(chosen[box.choice])) for box in boxes]

    def _refined(self, points: list[Point]) -> list[Box]:
        count = len(self.grid.axes)
        tolerance, most = _SHARP[count], _MOST_CELLS[count]
        boxes = self._cut(self.grid, points)
        for _ in range(_REFINEMENTS):
            changed = False
            for place, axis in enumerate(self.grid.axes):
                borders = {axis.edges[box.cells[count + place][0]] for box in boxes}
                for border in sorted(borders - {axis.edges[0]}):
                    if axis.cells < most:
                        changed |= axis.gap_cut(axis.cell_of(border), tolerance)
            if not changed:
                break
            boxes = self._cut(self.grid, points)
        return boxes

    def _illegal(self, boxes: list[Box]) -> set[tuple[Sizes, Candidate]]:
        """(sizes, candidate) of the cells where a box's candidate breaks a rule."""
        axes = len(self.grid.axes)
        found = set()
        for box in boxes:
            candidate = self.scores.contenders[box.choice]
            if candidate == self.default:
                continue
            for cell in product(*(range(first, end) for first, end in box.cells)):
                samples = (
                    axis.members(cell[axes + place], cell[place])
                    if self.proven
                    else axis.samples(cell[axes + place], cell[place])
                    for place, axis in enumerate(self.grid.axes)
                )
                broken = next((s for s in product(*samples) if not self.legal(s, candidate)), None)
                if broken is not None:
                    found.add((broken, candidate))
        return found


@lru_cache(maxsize=256)
def _block(candidate: Candidate) -> Any:
    """A table's block of one candidate."""
    return CandidateTable.of([candidate]).blocks[0]


def _place(axis: Axis, size: float) -> int:
    """The place of the first size of an axis that is not below a number."""
    return max(0, -((axis.sizes[0] - math.ceil(size)) // axis.sizes.step))
