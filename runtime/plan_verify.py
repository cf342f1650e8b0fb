"""Verifying a plan: one measurement for each interval that the model proposes, and what it teaches about the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.runtime.plan_axes import Grid
from kernelcast.runtime.plan_partition import Box
from kernelcast.runtime.verify import Verdict, sure_gain

Sizes = tuple[int, ...]

#: Weights of measured points fall with this power of the distance, in octaves: near ones decide.
_POWER = 4
#: Octaves from a point at which the forecast counts for as much as the measurement.
_REACH = 4.0
#: What another class of alignment counts for: more than any distance.
_FOREIGN = 1000.0

#: A measured difference decides beyond so many of its standard errors. A point speaks for many sizes and a plan compares some
#: dozens of pairs: at two errors one in forty of them would be luck.
_ERRORS = 3.0
#: The standard error of a candidate that ran in a single round, in log latency.
_UNKNOWN = 0.05


@dataclass(frozen=True, eq=False)
class Point:
    """What was measured at some sizes.

    Attributes:
        sizes: of the dynamic dimensions.
        classes: (first, end) of the classes of each axis that the point stands for.
        gain_log: [contenders] log latency less the default's, paired over rounds; NaN where not measured or failed.
        doubt_log: [contenders] how large a difference noise may be.
        failed: [contenders] True where it was tried and did not work.
        latency_us: [contenders] measured; NaN where not.
        confidence: of the verdict.
    """

    sizes: Sizes
    classes: tuple[tuple[int, int], ...]
    gain_log: np.ndarray
    doubt_log: np.ndarray
    failed: np.ndarray
    latency_us: np.ndarray
    confidence: float

    @property
    def sure_log(self) -> np.ndarray:
        """[contenders] ``gain_log``, where what is not faster beyond noise counts as fast as the default at best."""
        return np.where(self.faster | np.isnan(self.gain_log), self.gain_log, np.maximum(self.gain_log, 0.0))

    @property
    def faster(self) -> np.ndarray:
        """[contenders] whether each was faster than the default beyond noise."""
        return self.gain_log < -self.doubt_log

    @property
    def winner(self) -> int:
        """The fastest; the default where nothing is faster beyond noise."""
        return int(np.nanargmin(self.sure_log))

    @property
    def worked(self) -> np.ndarray:
        """[contenders] whether each ran and was not slower than the default beyond noise."""
        return np.isfinite(self.gain_log) & ~(self.gain_log > self.doubt_log)


def to_measure(
    own: int, neighbours: Sequence[int], logs: np.ndarray, most: int, kinds: Sequence[str] = ()
) -> list[int]:
    """The contenders to measure in a box: the default, its own, its neighbours', then the next of the forecast.

    Args:
        own: the box's candidate.
        neighbours: the candidates of the boxes that touch it.
        logs: [contenders] predicted there; NaN where not legal.
        most: how many.
        kinds: the variant of each contender, where the forecast cannot be trusted to tell variants apart: the best of each
            comes before the second of any.
    """
    near = sorted(set(neighbours), key=lambda choice: (logs[choice], choice))
    ranked = [int(row) for row in np.argsort(logs, kind="stable")]
    if kinds:
        turn = {
            row: sum(kinds[other] == kinds[row] for other in ranked[:place])
            for place, row in enumerate(ranked)
        }
        ranked.sort(key=lambda row: turn[row])
    found: list[int] = []
    for choice in (0, own, *near, *ranked):
        if choice not in found and (choice == 0 or not math.isnan(logs[choice])):
            found.append(choice)
    return found[:most]


def point_of(
    sizes: Sizes, classes: tuple[tuple[int, int], ...], chosen: Sequence[int], count: int, verdict: Verdict
) -> Point | None:
    """The point that a verification of some contenders gives; None where the default itself was not measured."""
    trial = verdict.trial
    logs, errors = trial.paired_log, np.where(np.isnan(trial.error_log), _UNKNOWN, trial.error_log)
    if not len(logs) or not np.isfinite(logs[0]):
        return None
    latency_us, gain_log, doubt_log = (np.full(count, np.nan) for _ in range(3))
    failed = np.zeros(count, dtype=bool)
    for place, choice in enumerate(chosen[: len(logs)]):
        if not np.isfinite(logs[place]):
            failed[choice] = True
            continue
        latency_us[choice] = trial.measurements[place].latency_us
        gain_log[choice] = sure_gain(trial, place)
        doubt_log[choice] = _ERRORS * math.hypot(errors[place], errors[0]) if place else 0.0
    return Point(sizes, classes, gain_log, doubt_log, failed, latency_us, verdict.confidence)


def corrected(
    logs: np.ndarray,
    grid: Grid,
    points: Sequence[Point],
    predicted: Callable[[Sizes], np.ndarray],
    hopeful: Collection[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Predictions as the measurements correct them, and what difference noise may be: both [*cells, contenders].

    At each point the measured gain over the default differs from the predicted one. These differences, a mean weighted by
    nearness, are added to the predictions of the cells around; far from all points the prediction stands. A candidate that
    was measured nowhere and is not hopeful, or failed anywhere, gets NaN everywhere, and one that was slower than the default beyond noise at a
    point gets NaN in that point's cell.

    Args:
        logs: predicted, NaN where not legal.
        grid: the cells.
        points: what was measured, at least one.
        predicted: the logs of some sizes.
        hopeful: contenders that keep their forecast although they were measured nowhere yet.
    """
    distance = np.array([_distances(grid, point) for point in points])  # [points, *cells]
    nearest = distance.argmin(axis=0)
    forecast = np.array([predicted(point.sizes) for point in points])
    residual = np.array([point.sure_log for point in points]) - (forecast - forecast[:, :1])
    weight = 1.0 / (distance + 1e-3) ** _POWER
    known = np.isfinite(residual)
    total = np.tensordot(weight, known.astype(float), axes=(0, 0)) + 1.0 / _REACH**_POWER
    shift = np.tensordot(weight, np.where(known, residual, 0.0), axes=(0, 0)) / total
    result = logs + shift
    failed = np.array([point.failed for point in points]).any(axis=0)
    measured = np.array([np.isfinite(point.gain_log) for point in points]).any(axis=0)
    wanted = np.isin(np.arange(logs.shape[-1]), list(hopeful))
    barred = np.flatnonzero(failed | ~(measured | wanted))
    result[..., barred[barred > 0]] = np.nan
    for point in points:
        slower = np.flatnonzero(~point.worked & np.isfinite(point.gain_log))
        result[grid.cell_of(point.sizes)][slower[slower > 0]] = np.nan
    # Doubt is for those that are surely faster than the default: which of them is the fastest matters less.
    doubt = np.array([np.where(point.faster, point.doubt_log, 0.0) for point in points])
    return result, doubt[nearest]


def _distances(grid: Grid, point: Point) -> np.ndarray:
    """How far every cell is from a point, in octaves."""
    count = len(grid.axes)
    total = np.zeros(grid.shape)
    for place, axis in enumerate(grid.axes):
        own = np.array(
            [not point.classes[place][0] <= each < point.classes[place][1] for each in range(axis.classes)]
        )
        shape = [1] * (2 * count)
        shape[place] = axis.classes
        total = total + _FOREIGN * own.reshape(shape)
        ends = np.array([*axis.edges[1:], axis.sizes[-1] + 1], dtype=float)
        octaves = np.abs(np.log2(np.sqrt(np.array(axis.edges) * ends) / point.sizes[place]))
        # The cell that the point lies in is at the point.
        octaves[axis.cell_of(point.sizes[place])] = 0.0
        shape = [1] * (2 * count)
        shape[count + place] = axis.cells
        total = total + octaves.reshape(shape)
    return total


def touching(boxes: Sequence[Box]) -> list[list[int]]:
    """Of each box the places of the boxes that share a side with it: next to it in one direction, overlapping in all others."""
    found: list[list[int]] = []
    for one in boxes:
        near = []
        for place, other in enumerate(boxes):
            sides = 0
            for (first, end), (other_first, other_end) in zip(one.cells, other.cells, strict=True):
                if first < other_end and other_first < end:
                    continue
                sides += 1 if end == other_first or other_end == first else 2
            if other is not one and sides == 1:
                near.append(place)
        found.append(near)
    return found


def founded(box: Box, grid: Grid, points: Sequence[Point]) -> bool:
    """Whether a box's candidate is the default, or was faster than it beyond noise at some point in the box."""
    return box.choice == 0 or any(
        point.faster[box.choice] and in_box(box, grid.cell_of(point.sizes)) for point in points
    )


def in_box(box: Box, cell: Sequence[int]) -> bool:
    """Whether a cell lies in a box."""
    return all(first <= each < end for each, (first, end) in zip(cell, box.cells, strict=True))
