"""The dynamic dimensions of a plan: which sizes they have, cut into cells, and by which powers of two sizes are told apart.

Whether a candidate is legal, and how fast it is, may depend on whether a size is a multiple of 16 (bulk copies and wide
loads) or of a split factor. Sizes are therefore told apart by two things: where they lie, and their *class*: the largest
of the moduli by which they can be divided.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from kernelcast.errors import InvalidProblemError

#: Divisors that rules and machine code look at: split factors, and 16 for vector loads and descriptors.
MODULI = (1, 2, 4, 8, 16)

#: Dimensions of a plan at most: a grid grows with their power.
MOST_DYNAMIC = 4

#: Cells of each dimension in the first grid, by the number of dimensions. With one: so many in an octave.
_FIRST_CELLS = {2: 14, 3: 8, 4: 5}
_CELLS_OF_AN_OCTAVE = 4

_SPAN = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")


#: What begins like a span and is none, such as "1.5..4" or "64:128", is a mistake and no word.
_LIKE_A_SPAN = re.compile(r".*\.\..*|\s*-?\d+\s*[:-]\s*-?\d+\s*", re.DOTALL)


def sizes_of(value: Any, name: str = "the dimension") -> range | None:
    """The sizes that a value names: a ``range``, a text ``"1..4096"`` or a pair ``(1, 4096)``, both ends included, or
    ``"64..4096..64"`` in steps. None where it is a single value.

    Args:
        value: of a dimension.
        name: of the dimension, for errors.

    Raises:
        InvalidProblemError: it is meant as sizes, and they are not whole, not ascending, below 1 or none at all.
    """
    if isinstance(value, range):
        if value.step < 0:
            raise _no_sizes(name, value, "its sizes descend")
        if not value:
            raise _no_sizes(
                name, value, f"it is empty, as it ends before {value.stop} and begins at {value.start}"
            )
        first, last, step = value.start, value[-1], value.step
    elif isinstance(value, str):
        found = _SPAN.fullmatch(value.strip())
        if found is None:
            if _LIKE_A_SPAN.fullmatch(value):
                raise _no_sizes(name, value, "it must be FIRST..LAST or FIRST..LAST..STEP in whole numbers")
            return None
        first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    elif isinstance(value, tuple | list):
        if len(value) != 2 or not all(_is_whole(each) for each in value):
            raise _no_sizes(name, value, "it must be a pair of whole numbers, the first and the last size")
        first, last, step = operator.index(value[0]), operator.index(value[1]), 1
    elif isinstance(value, slice | set | frozenset | dict):
        raise _no_sizes(name, value, "it is no range, text or pair")
    else:
        return None
    if step < 1:
        raise _no_sizes(name, value, f"its step is {step}")
    if first < 1:
        raise _no_sizes(name, value, f"it begins at {first}")
    if last < first:
        raise _no_sizes(name, value, f"its first size, {first}, is above its last, {last}")
    return range(first, last + 1, step)


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _no_sizes(name: str, value: Any, why: str) -> InvalidProblemError:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return InvalidProblemError(
        f"The sizes of {name} are {shown}: {why}. A plan needs an ascending range that begins at 1 or more, such as "
        "'1..4096' (both ends included) or range(1, 4097)."
    )


class Axis:
    """One dynamic dimension.

    Args:
        name: of the dimension.
        sizes: what it may be: ascending, from 1 or more.
        moduli: by which classes of sizes are told apart; each divides the next, the first is 1.

    Attributes:
        edges: first size of each cell, ascending. A cell goes up to the next edge.

    Raises:
        InvalidProblemError: the sizes are empty, descending, or begin below 1.
    """

    def __init__(self, name: str, sizes: range, moduli: Sequence[int] = MODULI) -> None:
        if not sizes or sizes.step < 1 or sizes[0] < 1:
            raise InvalidProblemError(
                f"The sizes of {name} are {sizes!r}; a plan needs an ascending range that begins at 1 or more, such as "
                f"range(1, 4097) or '1..4096'."
            )
        self.name = name
        self.sizes = sizes
        present = {self._class(size, moduli) for size in sizes[: 2 * moduli[-1]]}
        # A class without sizes (odd ones, among multiples of 64) is not there to be told apart.
        self.moduli = tuple(moduli[place] for place in sorted(present)) if len(moduli) > 1 else (1,)
        self.edges: list[int] = [sizes[0]]

    @property
    def classes(self) -> int:
        """How many classes of sizes there are."""
        return len(self.moduli)

    @property
    def cells(self) -> int:
        """How many cells the sizes are cut into."""
        return len(self.edges)

    def spread(self, dimensions: int) -> None:
        """Cut the sizes into the first cells, even in their logarithm."""
        octaves = math.log2(self.sizes[-1] / self.sizes[0])
        if dimensions == 1:
            cells = math.ceil(octaves * _CELLS_OF_AN_OCTAVE)
        else:
            cells = _FIRST_CELLS[dimensions] - 1
        if cells:
            for step in range(1, cells + 1):
                self.cut(round(self.sizes[0] * 2 ** (octaves * step / cells)))
        if dimensions == 1:
            # Tiles are powers of two: one more row than they hold begins another tile.
            for power in range(self.sizes[0].bit_length(), self.sizes[-1].bit_length()):
                self.cut(1 << power)
                self.cut((1 << power) + 1)

    def cut(self, size: int) -> bool:
        """Begin a cell at the first size of the range that is not below ``size``. Returns whether that is a new cell."""
        size = max(size, self.sizes[0])
        place = -((self.sizes[0] - size) // self.sizes.step)
        if place >= len(self.sizes) or self.sizes[place] in self.edges:
            return False
        insort(self.edges, self.sizes[place])
        return True

    def gap_cut(self, cell: int, tolerance: float) -> bool:
        """Halve the cell before ``cell``, unless that is short already. Returns whether there is a new cell."""
        low, high = self.edges[cell - 1], self.edges[cell]
        if high - low <= max(self.sizes.step, tolerance * high):
            return False
        middle = round(math.sqrt(low * high))
        return self.cut(max(low + 1, middle)) or self.cut((low + high) // 2)

    def members(self, cell: int, of_class: int) -> list[int]:
        """Every size in a cell that is of a class."""
        return [size for size in self._span(cell) if self.class_of(size) == of_class]

    def least(self, cell: int, of_class: int) -> int | None:
        """The smallest size in a cell that is of a class; None where there is none."""
        # Classes repeat after the largest modulus at the latest.
        for size in self._span(cell)[: MODULI[-1]]:
            if self.class_of(size) == of_class:
                return size
        return None

    def samples(self, cell: int, of_class: int) -> list[int]:
        """Some of the sizes of :meth:`members`: the first, the last, and one between."""
        span = self._span(cell)
        window = MODULI[-1]
        middle = max(0, (len(span) - window) // 2)
        found = []
        for part in (span[:window], span[middle : middle + window], span[: -window - 1 : -1]):
            found += [next((size for size in part if self.class_of(size) == of_class), None)]
        return sorted({size for size in found if size is not None})

    def _span(self, cell: int) -> range:
        """Every size in a cell."""
        end = self.edges[cell + 1] if cell + 1 < self.cells else self.sizes[-1] + 1
        first = (self.edges[cell] - self.sizes[0]) // self.sizes.step
        return self.sizes[first : -((self.sizes[0] - end) // self.sizes.step)]

    def cell_of(self, size: int) -> int:
        """The cell that a size of the range lies in."""
        return bisect_right(self.edges, size) - 1

    def class_of(self, size: int) -> int:
        """The place of the largest modulus that divides a size."""
        return self._class(size, self.moduli)

    def last(self, end: int) -> int:
        """The largest size before the cell ``end``."""
        if end == self.cells:
            return self.sizes[-1]
        return self.sizes[self.sizes.index(self.edges[end]) - 1]

    def weights(self) -> np.ndarray:
        """[classes, cells]: a cell's share of the range, in logarithms, split over the classes that are in it; they sum to 1.

        In logarithms, since small and large sizes shall count alike. All classes count alike too: multiples of 16 are a
        sixteenth of all sizes, and most of those that are used.
        """
        ends = np.array([*self.edges[1:], self.sizes[-1] + 1], dtype=float)
        share = np.log(ends / np.array(self.edges, dtype=float))
        there = np.array(
            [
                [self.least(cell, each) is not None for cell in range(self.cells)]
                for each in range(self.classes)
            ]
        )
        weight = np.where(there, share[None] / self.classes, 0.0)
        return weight / weight.sum()

    @staticmethod
    def _class(size: int, moduli: Sequence[int]) -> int:
        for place in range(len(moduli) - 1, 0, -1):
            if size % moduli[place] == 0:
                return place
        return 0


class Grid:
    """The cells of several dimensions together. A *cell* is (class of each axis ..., cell of each axis ...)."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self.axes = tuple(axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Classes of each axis, then cells of each."""
        return (*(axis.classes for axis in self.axes), *(axis.cells for axis in self.axes))

    def cells(self) -> Iterator[tuple[int, ...]]:
        """Every cell."""
        return product(*(range(count) for count in self.shape))

    def least(self, cell: Sequence[int]) -> tuple[int, ...] | None:
        """The smallest sizes in a cell; None where it has none."""
        sizes = []
        for place, axis in enumerate(self.axes):
            size = axis.least(cell[len(self.axes) + place], cell[place])
            if size is None:
                return None
            sizes.append(size)
        return tuple(sizes)

    def weights(self) -> np.ndarray:
        """A weight a cell, of :attr:`shape`; they sum to 1."""
        count = len(self.axes)
        total = np.ones(self.shape)
        for place, axis in enumerate(self.axes):
            shape = [1] * (2 * count)
            shape[place], shape[count + place] = axis.classes, axis.cells
            total = total * axis.weights().reshape(shape)
        return total

    def cell_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The cell that some sizes lie in."""
        return (
            *(axis.class_of(size) for axis, size in zip(self.axes, sizes, strict=True)),
            *(axis.cell_of(size) for axis, size in zip(self.axes, sizes, strict=True)),
        )


def split_values(values: Mapping[str, Any]) -> tuple[dict[str, range], dict[str, str], dict[str, Any]]:
    """(sizes of each dynamic dimension, dimension -> the dynamic one it equals, all other values) of a plan's values.

    Raises:
        InvalidProblemError: nothing is dynamic, or too much is.
    """
    dynamic: dict[str, range] = {}
    for name, value in values.items():
        sizes = sizes_of(value, name)
        if sizes is not None:
            dynamic[name] = sizes
    if not 0 < len(dynamic) <= MOST_DYNAMIC:
        seen = ", ".join(
            f"{name}={value!r}" for name, value in values.items() if name in dynamic or not dynamic
        )
        raise InvalidProblemError(
            f"{len(dynamic)} dimensions are dynamic ({seen or 'no values were given'}); a plan needs 1 to {MOST_DYNAMIC}, each a "
            "range of sizes, such as m=range(1, 4097) or m='1..4096'."
        )
    tied = {name: value for name, value in values.items() if isinstance(value, str) and value in dynamic}
    fixed = {name: value for name, value in values.items() if name not in dynamic and name not in tied}
    return dynamic, tied, fixed
