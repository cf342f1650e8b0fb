"""The heads of a model and what each predicts. Shared by fitting and by the run time; numpy alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelcast.costmodel.forest import Forest

#: The heads that decide the order, of which :func:`relative_log` is the mean. Without an estimate there is no ``remainder``.
ORDER_HEADS = ("difference", "slowdown", "remainder")
#: The heads of every model; see :class:`kernelcast.costmodel.estimator.CostModel`.
OTHER_HEADS = ("level", "error")

#: The target of ``slowdown`` is ``log(1 + SCALE * s)`` of the log slowdown s over the problem's best: about
#: proportional to s for the near-best that a ranking is about, and compressed for candidates that are out of question.
SLOWDOWN_SCALE = 5.0

#: Predictions of a compressed slowdown beyond this (a factor of e**80) are cut, so that nothing overflows.
_MOST_COMPRESSED = 6.0
_LOG_2 = float(np.log(2.0))


def order_heads(estimate: int | None) -> tuple[str, ...]:
    """The heads that decide the order, with or without an estimate of the time among the features."""
    return ORDER_HEADS[:-1] if estimate is None else ORDER_HEADS


def compress(slowdown_log: np.ndarray) -> np.ndarray:
    """Log slowdown over the problem's best -> compressed slowdown."""
    return np.log1p(SLOWDOWN_SCALE * slowdown_log)


def expand(compressed: np.ndarray) -> np.ndarray:
    """The inverse of :func:`compress`: a log slowdown, float64."""
    return np.expm1(np.minimum(np.asarray(compressed, dtype=np.float64), _MOST_COMPRESSED)) / SLOWDOWN_SCALE


def estimated_log(features: np.ndarray, estimate: int) -> np.ndarray:
    """The natural logarithm of the estimate, which is a feature in log2: float64 [rows].

    0, the least time that the problem may take, where there is none (a closed library).
    """
    found = features[:, estimate].astype(np.float64)
    np.copyto(found, 0.0, where=np.isnan(found))
    found *= _LOG_2
    return found


def combined(said: np.ndarray, features: np.ndarray, estimate: int | None) -> np.ndarray:
    """What the heads of the order say together: log latency up to a constant of the problem, float64 [rows].

    Args:
        said: what each of :func:`order_heads` predicts, float64 [heads, rows].
        features: float32 [rows, features].
        estimate: the column of the estimate, None without one.
    """
    total = said[0] + expand(said[1])
    if estimate is None:
        return total / 2.0
    total += said[2]
    total += estimated_log(features, estimate)
    total /= 3.0
    return total


def relative_log(forests: Mapping[str, Forest], features: np.ndarray, estimate: int | None) -> np.ndarray:
    """Log latency of one problem's candidates, up to a constant of the problem: float64 [rows]."""
    said = np.array([forests[name].predict(features) for name in order_heads(estimate)])
    return combined(said, features, estimate)


def contributions(
    forests: Mapping[str, Forest], features: np.ndarray, estimate: int | None
) -> tuple[float, np.ndarray]:
    """What each feature adds to :func:`relative_log`: what all start from, and float64 [rows, features].

    A row's sum with the former is its prediction, up to rounding. The parts of a compressed slowdown are stretched alike,
    so that they sum to the slowdown.
    """
    names = order_heads(estimate)
    start, parts = 0.0, np.zeros(features.shape)
    for name in names:
        base, found = forests[name].contributions(features)
        if name == "slowdown":
            moved, expanded = found.sum(axis=1), float(expand(np.array(base)))
            ratio = np.ones(len(features))
            np.divide(expand(base + moved) - expanded, moved, out=ratio, where=moved != 0.0)
            base, found = expanded, found * ratio[:, None]
        start += base / len(names)
        parts += found / len(names)
    if estimate is not None:
        parts[:, estimate] += estimated_log(features, estimate) / len(names)
    return start, parts
