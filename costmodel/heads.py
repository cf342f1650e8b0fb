"""How the heads of a model make one prediction. Shared by fitting and by the run time; numpy alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelcast.costmodel.forest import Forest

#: The heads of a model; see :class:`kernelcast.costmodel.estimator.CostModel`.
HEADS = ("relative", "slowdown", "level", "error")

#: The slowdown head predicts ``log(1 + SCALE * s)`` of the log slowdown s over the problem's best: about proportional
#: to s for the near-best that a ranking is about, and compressed for candidates that are out of question.
SLOWDOWN_SCALE = 5.0

#: Predictions of the slowdown head beyond this (a factor of e**80) are cut, so that nothing overflows.
_MOST_COMPRESSED = 6.0


def compress(slowdown_log: np.ndarray) -> np.ndarray:
    """Log slowdown over the problem's best -> target of the slowdown head."""
    return np.log1p(SLOWDOWN_SCALE * slowdown_log)


def combined(relative: np.ndarray, compressed: np.ndarray) -> np.ndarray:
    """Log latency of a problem's candidates, up to a constant of the problem: the mean of both heads' views.

    Args:
        relative: of the relative head.
        compressed: of the slowdown head.
    """
    return 0.5 * (relative + np.expm1(np.minimum(compressed, _MOST_COMPRESSED)) / SLOWDOWN_SCALE)


def relative_log(forests: Mapping[str, Forest], features: np.ndarray) -> np.ndarray:
    """:func:`combined` of two forests' predictions: float64 [rows]."""
    return combined(forests["relative"].predict(features), forests["slowdown"].predict(features))
