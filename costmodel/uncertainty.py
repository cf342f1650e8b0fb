"""How far predicted differences are off: the error head, fitted on problems that were left out in turn.

The error head is a forest that predicts the logarithm of a standard deviation, fitted by the likelihood of normal errors (the
squared error over the variance, and the logarithm of the variance). It sees the errors of models that did not see the
problems. Needs xgboost to fit; see :mod:`kernelcast.costmodel.calibrate` for what is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.kernels import Problem

#: Standard deviation of the error of a difference where there are too few problems to leave some out.
UNKNOWN_ERROR = 0.15

#: Size of the error head.
_TREES = 20
_DEPTH = 5
_RATE = 0.3
#: Share of all rows' weight that a leaf needs, within limits: errors of few problems say little about others.
_LEAF_SHARE = 0.01
_LEAST_LEAF, _MOST_LEAF = 10.0, 200.0
#: A candidate r times slower than the problem's best counts ``r ** -_FOCUS`` in the fit ...
_FOCUS = 2.0
#: ... and in the error that all candidates share.
_GOOD_FOCUS = 2.0
#: Added to squared errors: no difference is measured better.
_LEAST_SQUARE = 1e-6
#: No single error counts for more than so many of the expected squares.
_MOST_SURPRISE = 50.0

#: Share of normally distributed values within one standard deviation of their mean.
_WITHIN_ONE = math.erf(math.sqrt(0.5))

#: Regions of shapes, and the fewest shapes that each has on average.
_REGIONS = 30
_LEAST_REGION = 20
_ROUNDS = 20
_MOST_CENTRED = 8192


@dataclass(frozen=True, eq=False)
class LeftOut:
    """What is said of each row by models that did not see its problem; rows as in the fit.

    Attributes:
        predicted: log latency up to a constant of the problem, float64 [rows].
        error: standard deviation of the error of a difference, float64 [rows].
        fold: the fold that left the row out, intp [rows].
    """

    predicted: np.ndarray
    error: np.ndarray
    fold: np.ndarray

    def over(self, rows: np.ndarray) -> LeftOut:
        """The same over more rows, of which these are those marked; nothing (NaN, fold -1) is known of the others."""
        predicted, error = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
        fold = np.full(len(rows), -1, dtype=np.intp)
        predicted[rows], error[rows], fold[rows] = self.predicted, self.error, self.fold
        return LeftOut(predicted, error, fold)


@dataclass(frozen=True, eq=False)
class ErrorHead:
    """The fitted error head.

    Attributes:
        booster: xgboost's.
        mean: to be added to its predictions, which then are the logarithm of a standard deviation.
        left_out: None where there were too few problems to leave some out.
    """

    booster: Any
    mean: float
    left_out: LeftOut | None


def fit_error(
    X: np.ndarray,
    target: np.ndarray,
    slowdown: np.ndarray,
    weight: np.ndarray,
    group: np.ndarray,
    fold: np.ndarray | None,
    predict_left_out: Callable[[np.ndarray], np.ndarray],
    *,
    seed: int,
    threads: int,
) -> ErrorHead:
    """Fit the error head.

    Args:
        X: features float32 [rows, features].
        target: log latency [rows], up to a constant of the problem.
        slowdown: log latency over the problem's best [rows].
        weight: what each row counts [rows], above 0.
        group: number of the problem [rows], every one from 0 on.
        fold: of each row, alike for all rows of a problem; None leaves nothing out.
        predict_left_out: given True for the rows that are left out, what a model fitted on the others predicts for them.
        seed: of the trees.
        threads: of the fit.
    """
    if fold is None:
        unknown = np.full(len(X), UNKNOWN_ERROR**2 - _LEAST_SQUARE)
        booster, mean = _boost(X, unknown, np.ones(len(X)), seed, threads)
        return ErrorHead(booster, mean, None)
    weights = weight * np.exp(-_FOCUS * slowdown)
    predicted = np.empty(len(X))
    for held in np.unique(fold):
        out = fold == held
        predicted[out] = predict_left_out(out)
    square = _squares(predicted - target, slowdown, group)
    booster, mean = _boost(X, square, weights, seed, threads)
    # Each fold's errors by what the other folds' errors teach: the head is judged as it will be used.
    error = np.empty(len(X))
    for held in np.unique(fold):
        out = fold == held
        nested, nested_mean = _boost(X[~out], square[~out], weights[~out], seed, threads)
        error[out] = np.exp(nested_mean + _predict(nested, X[out]))
    scale = scale_of(standardised(predicted, error, target, group))
    return ErrorHead(booster, mean + math.log(scale), LeftOut(predicted, error * scale, fold))


def standardised(
    predicted: np.ndarray, error: np.ndarray, target: np.ndarray, group: np.ndarray
) -> np.ndarray:
    """Error of each row's predicted difference to the problem's measured best over what was said of it, absolute: [rows].

    NaN for the best itself.
    """
    best = _first_of_each(target, group)
    off = (predicted - predicted[best][group]) - (target - target[best][group])
    scores = np.abs(off) / error
    scores[best] = np.nan
    return scores


def regions(problems: Sequence[Problem], seed: int = 0) -> np.ndarray:
    """What is left out together, as a number for each problem.

    Half of the regions of log sizes are left out as wholes, so that the errors are also those of shapes with nothing like
    them in training, as a new workload has. Elsewhere the problems of one shape go together, as near neighbours are the
    rule in use. With few shapes there are no regions.
    """
    sizes = np.array([[size for _, size in problem.dims] for problem in problems], dtype=np.float64)
    shapes, shape_of = np.unique(np.log2(sizes.reshape(len(problems), -1) + 1.0), axis=0, return_inverse=True)
    shape_of = shape_of.ravel()
    count = min(len(shapes) // _LEAST_REGION, _REGIONS)
    if count < 2:
        return shape_of
    rng = np.random.default_rng(seed)
    region = _clusters(shapes, count, rng)
    whole = np.zeros(count, dtype=bool)
    whole[rng.permutation(count)[: count // 2]] = True
    together = np.where(whole[region], region, count + np.arange(len(shapes)))
    return together[shape_of]


def folds_of(clusters: np.ndarray, group: np.ndarray, folds: int, seed: int) -> np.ndarray | None:
    """The fold of each row, folds of about equal size; None where there are fewer than two clusters or folds.

    Args:
        clusters: [rows] what is left out together.
        group: [rows] the problem.
        folds: how many.
        seed: of the order in which clusters of one size are dealt out.
    """
    _, cluster = np.unique(clusters, return_inverse=True)
    count = int(cluster.max()) + 1 if len(cluster) else 0
    folds = min(folds, count)
    if folds < 2:
        return None
    problems = np.unique(np.column_stack([cluster, group]), axis=0)[:, 0]
    size = np.bincount(problems, minlength=count)
    shuffled = np.random.default_rng(seed).permutation(count)
    filled, fold = np.zeros(folds), np.empty(count, dtype=np.intp)
    for each in shuffled[np.argsort(-size[shuffled], kind="stable")]:
        fold[each] = int(np.argmin(filled))
        filled[fold[each]] += size[each]
    return fold[cluster]


def _squares(residual: np.ndarray, slowdown: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The square of the error of a difference that each row stands for: twice that of its own error.

    What the good candidates of a problem share is no error of a difference.
    """
    weights = np.exp(-_GOOD_FOCUS * slowdown)
    shared = np.bincount(group, weights=weights * residual) / np.bincount(group, weights=weights)
    return 2.0 * (residual - shared[group]) ** 2


def _boost(
    X: np.ndarray, square: np.ndarray, weights: np.ndarray, seed: int, threads: int
) -> tuple[Any, float]:
    """(booster, mean) of the log standard deviation that makes squared errors the likeliest."""
    import xgboost

    square = square + _LEAST_SQUARE
    mean = 0.5 * math.log(float(np.average(square, weights=weights)))

    def likelihood(log_error: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
        surprise = np.minimum(square * np.exp(-2.0 * (log_error + mean)), _MOST_SURPRISE)
        return (1.0 - surprise) * weights, (1.0 + surprise) * weights

    parameters = {
        "objective": "reg:squarederror",
        "tree_method": "hist",
        "base_score": 0.0,
        "max_depth": _DEPTH,
        "learning_rate": _RATE,
        "min_child_weight": float(np.clip(_LEAF_SHARE * weights.sum(), _LEAST_LEAF, _MOST_LEAF)),
        "subsample": 0.8,
        "colsample_bytree": 0.6,
        "seed": seed,
        "nthread": threads,
    }
    rows = xgboost.DMatrix(X, label=np.zeros(len(X)))
    booster = xgboost.train(parameters, rows, num_boost_round=_TREES, obj=likelihood)
    ratio = float(np.average(square * np.exp(-2.0 * (mean + _predict(booster, X))), weights=weights))
    return booster, mean + 0.5 * math.log(ratio)


def _predict(booster: Any, X: np.ndarray) -> np.ndarray:
    import xgboost

    return np.asarray(booster.predict(xgboost.DMatrix(X)), dtype=np.float64)


def scale_of(scores: np.ndarray) -> float:
    """What scores must be divided by for as many to be within 1 as of normally distributed ones."""
    scores = scores[np.isfinite(scores)]
    return max(float(np.quantile(scores, _WITHIN_ONE)), 1e-3) if len(scores) else 1.0


def _first_of_each(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The row with the smallest value of each group: intp [groups]."""
    order = np.lexsort((values, group))
    return order[np.concatenate([[True], np.diff(group[order]) != 0])]


def _clusters(points: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The number of the nearest of ``count`` centres, found by Lloyd's rounds on a sample: intp [points]."""
    sample = points if len(points) <= _MOST_CENTRED else points[rng.permutation(len(points))[:_MOST_CENTRED]]
    centres = sample[rng.permutation(len(sample))[:count]]
    for _ in range(_ROUNDS):
        nearest = _nearest(sample, centres)
        size = np.bincount(nearest, minlength=count)
        sums = np.stack(
            [np.bincount(nearest, weights=column, minlength=count) for column in sample.T], axis=1
        )
        centres = np.where(size[:, None] > 0, sums / np.maximum(size, 1)[:, None], centres)
    return _nearest(points, centres)


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    distance = (points**2).sum(axis=1)[:, None] - 2.0 * points @ centres.T + (centres**2).sum(axis=1)[None]
    return np.argmin(distance, axis=1)
