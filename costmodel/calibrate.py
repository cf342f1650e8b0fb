"""What comes true of the regrets that a model expects, found on problems that were left out of its fit. numpy alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from kernelcast.costmodel.adaptive import (
    MOST,
    NOTHING,
    UNKNOWN_WIDENING,
    Adaptive,
    Calibration,
    Curve,
    expected_regrets,
)
from kernelcast.costmodel.novelty import Reach
from kernelcast.costmodel.uncertainty import LeftOut, scale_of, standardised
from kernelcast.kernels import Candidate, CandidateTable, Problem, operation, operation_names

#: Points of a curve from believed to true regrets.
_POINTS = 16
#: With fewer left-out problems nothing is said of regrets.
_LEAST_PROBLEMS = 30
#: Mean regrets for which bounds are kept, in log latency.
_TARGETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05)
#: Bounds that are tried, in log latency.
_BOUNDS = np.geomspace(1e-5, 0.5, 160)
_LEAST_TRUE = 1e-6
#: The largest factor on the errors of problems beyond training, and the fewest problems that tell it.
_MOST_WIDENING = 4.0
_LEAST_NOVEL = 20
#: So many novel problems, and half of what was measured (of its logarithm) is believed.
_FEW_NOVEL = 200


@dataclass(frozen=True, eq=False)
class _Regrets:
    """Of problems that were left out, float64 [problems, ks]: regrets that were believed, and those that came true."""

    believed: np.ndarray
    true: np.ndarray


def assess(
    problems: Sequence[Problem],
    tables: Sequence[CandidateTable],
    target: np.ndarray,
    group: np.ndarray,
    left_out: LeftOut | None,
) -> Adaptive:
    """What a fitted model knows of its limits.

    Args:
        problems: those fitted on.
        tables: the candidates of each.
        target: log latency of the rows of all tables, one after the other.
        group: number of the problem [rows].
        left_out: what was said of the rows by models that did not see their problem; None where there were none.
    """
    reach = Reach.of(problems)
    if left_out is None:
        return Adaptive(reach)
    fold = np.full(len(problems), -1)
    fold[group] = left_out.fold
    novel = np.zeros(len(problems), dtype=bool)
    for held in np.unique(fold[fold >= 0]):
        known = Reach.of([problem for problem, its in zip(problems, fold, strict=True) if its != held])
        for number in np.flatnonzero(fold == held).tolist():
            novel[number] = bool(known.novelty(problems[number]))
    default = np.concatenate([_default_rows(problems[0].operation, table) for table in tables])
    return Adaptive(reach, calibrate(left_out, target, group, default, novel))


def _default_rows(operation_name: str, table: CandidateTable) -> np.ndarray:
    default = (
        operation(operation_name).default if operation_name in operation_names() else Candidate.of("vendor")
    )
    rows = np.zeros(len(table), dtype=bool)
    start = 0
    for block in table.blocks:
        if block.variant == default.variant:
            rows[start : start + block.length] = [block.at(row) == default for row in range(block.length)]
        start += block.length
    return rows


def calibrate(
    left_out: LeftOut,
    target: np.ndarray,
    group: np.ndarray,
    default: np.ndarray,
    novel: np.ndarray,
) -> Calibration | None:
    """What came true of the expected regrets of problems left out; None where they are too few to tell.

    Args:
        left_out: what was said of them.
        target: log latency [rows].
        group: number of the problem [rows], rows of a problem beside each other.
        default: bool [rows], True for the default.
        novel: bool [problems], True where a problem lay beyond what its fold's models were fitted on.
    """
    limits = np.concatenate([[0], np.flatnonzero(np.diff(group)) + 1, [len(group)]])
    rows = [
        np.arange(start, end)
        for start, end in pairwise(limits.tolist())
        if end > start and np.isfinite(left_out.predicted[start])
    ]
    if len(rows) < _LEAST_PROBLEMS:
        return None
    rows = [own[np.lexsort((left_out.predicted[own], ~default[own]))] for own in rows]
    widening = _widening(left_out, target, group, novel)
    found = _regrets(left_out, target, rows, np.where(novel, widening, 1.0)[group])
    alone = _came_true(found.believed[:, :1], found.true[:, :1])
    several = _came_true(found.believed[:, 1:], found.true[:, 1:])
    calibration = Calibration(alone, several, Curve((1.0,), (1.0,)), widening, len(rows))
    return replace(calibration, bounds=_bounds(calibration.truly(found.believed), found.true))


def _regrets(
    left_out: LeftOut, target: np.ndarray, rows: Sequence[np.ndarray], widening: np.ndarray
) -> _Regrets:
    """Regrets of problems, the rows of each in the order in which they are measured; ``widening`` is of each row."""
    believed, true = np.zeros((len(rows), MOST)), np.zeros((len(rows), MOST))
    for number, own in enumerate(rows):
        expected = expected_regrets(left_out.predicted[own], widening[own] * left_out.error[own], MOST)
        regret = np.minimum.accumulate(target[own][:MOST]) - target[own].min()
        believed[number, : len(expected)] = expected
        true[number, : len(regret)] = regret
    return _Regrets(believed, true)


def _widening(left_out: LeftOut, target: np.ndarray, group: np.ndarray, novel: np.ndarray) -> float:
    """How much larger than said the errors of novel problems are, beside those of the others; less where they are few."""
    scores = standardised(left_out.predicted, left_out.error, target, group)
    known = np.isfinite(left_out.predicted)
    beyond, count = known & novel[group], len(np.unique(group[known & novel[group]]))
    if count < _LEAST_NOVEL or not (known & ~beyond).any():
        return UNKNOWN_WIDENING
    ratio = scale_of(scores[beyond]) / scale_of(scores[known & ~beyond])
    return float(np.clip(ratio, 1.0, _MOST_WIDENING) ** (count / (count + _FEW_NOVEL)))


def _came_true(believed: np.ndarray, true: np.ndarray) -> Curve:
    """The curve of true over believed regrets: bins of equally many, their means made never falling."""
    some = believed > NOTHING
    if not some.any():
        return Curve((1.0,), (1.0,))
    order = np.argsort(believed[some], kind="stable")
    xs, ys = believed[some][order], true[some][order]
    means, counts = [], []
    points = []
    for part in np.array_split(np.arange(len(xs)), min(_POINTS, len(xs))):
        points.append(float(np.exp(np.log(xs[part]).mean())))
        means.append(_surely(ys[part]))
        counts.append(len(part))
    rising = _never_falling(np.maximum(means, _LEAST_TRUE), np.array(counts, dtype=np.float64))
    places, values = np.unique(points, return_index=True)
    return Curve(tuple(places.tolist()), tuple(rising[values].tolist()))


def _bounds(expected: np.ndarray, true: np.ndarray) -> Curve:
    """For each target the largest bound on a problem's expected regret that keeps the mean true regret under it, and two
    standard errors of that mean."""
    means = np.empty(len(_BOUNDS))
    for i, bound in enumerate(_BOUNDS):
        enough = expected <= bound
        chosen = np.where(enough.any(axis=1), enough.argmax(axis=1), expected.shape[1] - 1)
        means[i] = _surely(true[np.arange(len(true)), chosen])
    limits = []
    for target in _TARGETS:
        kept = np.flatnonzero(means <= target)
        limits.append(float(_BOUNDS[kept[-1]] if len(kept) else _BOUNDS[0]))
    return Curve(_TARGETS, tuple(np.maximum.accumulate(limits).tolist()))


def _surely(regrets: np.ndarray) -> float:
    """The mean, and two standard errors more than what was seen: what is promised should hold."""
    return float(regrets.mean() + 2.0 * regrets.std() / math.sqrt(len(regrets)))


def _never_falling(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The closest sequence that never falls, by pooling neighbours that do (isotonic regression)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            total = before[1] + pool[1]
            pool = ((before[0] * before[1] + pool[0] * pool[1]) / total, total, before[2] + pool[2])
        pools.append(pool)
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
