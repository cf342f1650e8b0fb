"""The intervals of a plan, and the table that finds the one that some sizes lie in."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Candidate

#: What an interval's candidate may come from.
INTERVAL_SOURCES = ("verified", "predicted", "analytic", "default")

#: Entries of the table that answers: beyond this a plan is no table.
_MOST_ENTRIES = 2**20


@dataclass(frozen=True)
class Interval:
    """The sizes at which one candidate runs.

    Attributes:
        first: smallest size of each dynamic dimension, in the plan's order.
        last: largest size of each, included.
        alignment: of each dimension (multiple of, not multiple of): (16, 0) are the multiples of 16, (1, 16) those that
            are none, (1, 0) all.
        candidate: what runs.
        source: ``"verified"`` (measured here), ``"predicted"`` (by the model), ``"analytic"`` (by the roofline) or
            ``"default"``.
        point: the sizes that the figures are of.
        predicted_us: predicted latency of the candidate, in microseconds.
        measured_us: measured latency; NaN without a measurement.
        default_us: the default's latency, measured if the candidate's was, else predicted.
        confidence: of the verification; NaN without one.

    Raises:
        InvalidRecordError: the fields contradict each other.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    alignment: tuple[tuple[int, int], ...]
    candidate: Candidate
    source: str
    point: tuple[int, ...]
    predicted_us: float = math.nan
    measured_us: float = math.nan
    default_us: float = math.nan
    confidence: float = math.nan

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.first, self.last, self.alignment, self.point)}
        whole = [*self.first, *self.last, *self.point, *(each for pair in self.alignment for each in pair)]
        if len(lengths) != 1 or not self.first or any(type(each) is not int for each in whole):
            raise InvalidRecordError(
                f"An interval from {self.first!r} to {self.last!r} (alignment {self.alignment!r}, point {self.point!r}) needs "
                "as many whole numbers in each of these as there are dynamic dimensions."
            )
        if any(not 1 <= low <= high for low, high in zip(self.first, self.last, strict=True)):
            raise InvalidRecordError(f"An interval goes from {self.first} to {self.last}.")
        for multiple, other in self.alignment:
            if multiple < 1 or (other and (other <= multiple or other % multiple)):
                raise InvalidRecordError(
                    f"An interval holds multiples of {multiple} that are none of {other}; the second must be a multiple of "
                    "the first, or 0."
                )
        if self.source not in INTERVAL_SOURCES:
            raise InvalidRecordError(
                f"An interval's source is {self.source!r}; known: {', '.join(INTERVAL_SOURCES)}."
            )

    @property
    def latency_us(self) -> float:
        """The measured latency if there is one, else the predicted."""
        return self.predicted_us if math.isnan(self.measured_us) else self.measured_us

    @property
    def speedup(self) -> float:
        """The default's latency over the candidate's; NaN where one is not known."""
        return self.default_us / self.latency_us

    def holds(self, sizes: tuple[int, ...]) -> bool:
        """Whether some sizes lie in it."""
        return all(
            low <= size <= high and size % multiple == 0 and (not other or size % other != 0)
            for size, low, high, (multiple, other) in zip(
                sizes, self.first, self.last, self.alignment, strict=True
            )
        )


class Table:
    """Answers which interval some sizes lie in: by bisection in each dimension, then one look-up."""

    def __init__(self, dynamic: tuple[tuple[str, range], ...], intervals: tuple[Interval, ...]) -> None:
        self._axes: list[tuple[str, range, list[int], list[int], int]] = []
        entries = 1
        choices: list[list[tuple[int, int]]] = []
        for place, (name, sizes) in enumerate(dynamic):
            for interval in intervals:
                if len(interval.first) != len(dynamic):
                    raise InvalidRecordError(
                        f"An interval has {len(interval.first)} sizes; the plan has {len(dynamic)}."
                    )
                if not sizes[0] <= interval.first[place] <= interval.last[place] <= sizes[-1]:
                    raise InvalidRecordError(
                        f"An interval goes from {interval.first} to {interval.last}; {name} goes from {sizes[0]} to {sizes[-1]}."
                    )
            starts = sorted({interval.first[place] for interval in intervals} | {sizes[0]})
            moduli = sorted(
                {each for interval in intervals for each in interval.alignment[place] if each > 1}
            )
            for small, large in pairwise(moduli):
                if large % small:
                    raise InvalidRecordError(f"The alignments {moduli} of {name} do not divide one another.")
            width = len(starts) * (len(moduli) + 1)
            entries *= width
            if entries > _MOST_ENTRIES:
                raise InvalidRecordError(
                    f"The plan's table has over {_MOST_ENTRIES} entries; it has too many intervals."
                )
            self._axes.append((name, sizes, starts, moduli, width))
            choices.append([(start, kind) for start in starts for kind in range(len(moduli) + 1)])
        self._entries = [self._only(key, dynamic, intervals) for key in product(*choices)]
        self._simple = len(self._axes) == 1 and not self._axes[0][3]

    def _only(
        self,
        key: tuple[tuple[int, int], ...],
        dynamic: tuple[tuple[str, range], ...],
        intervals: tuple[Interval, ...],
    ) -> int:
        """The interval of one entry: (first size, class) of each dimension."""
        found = []
        for number, interval in enumerate(intervals):
            for place, (start, kind) in enumerate(key):
                moduli = [1, *self._axes[place][3]]
                multiple, other = interval.alignment[place]
                of_class = moduli[kind] % multiple == 0 and (not other or moduli[kind] % other != 0)
                if not (interval.first[place] <= start <= interval.last[place] and of_class):
                    break
            else:
                found.append(number)
        if len(found) == 1:
            number = found[0]
            for place, (start, _) in enumerate(key):
                starts = self._axes[place][2]
                after = bisect_right(starts, start)
                sizes = dynamic[place][1]
                last = starts[after] - 1 if after < len(starts) else sizes[-1]
                # The interval must reach to where the next entry begins.
                if not _no_size_between(sizes, intervals[number].last[place], last):
                    found = []
                    break
        if len(found) != 1:
            where = ", ".join(f"{dynamic[place][0]} {start}" for place, (start, _) in enumerate(key))
            raise InvalidRecordError(
                f"The sizes from {where} on lie in {len(found)} intervals; every size must lie in exactly one."
            )
        return found[0]

    def find(self, sizes: Mapping[str, Any]) -> int:
        """The place of the interval; -1 outside the plan's sizes.

        Raises:
            KeyError: a dimension is missing.
            TypeError: a size is no integer.
        """
        if self._simple:
            name, allowed, starts, _, _ = self._axes[0]
            size = _whole(sizes[name])
            return self._entries[bisect_right(starts, size) - 1] if size in allowed else -1
        place = 0
        for name, allowed, starts, moduli, width in self._axes:
            size = _whole(sizes[name])
            if size not in allowed:
                return -1
            kind = 0
            for modulus in moduli:
                if size % modulus:
                    break
                kind += 1
            place = place * width + (bisect_right(starts, size) - 1) * (len(moduli) + 1) + kind
        return self._entries[place]


def _whole(size: Any) -> int:
    if size is True or size is False:  # integers to Python, and no sizes
        raise TypeError
    return operator.index(size)


def _no_size_between(sizes: range, last: int, end: int) -> bool:
    """Whether a range has no size above ``last`` up to ``end``."""
    return last >= end or len(range(sizes[0], end + 1, sizes.step)) <= len(
        range(sizes[0], last + 1, sizes.step)
    )
