"""The heads of a model and what each predicts. Shared by fitting and by the run time; numpy alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelcast.costmodel.forest import Forest

#: The heads of a model; see :class:`kernelcast.costmodel.estimator.CostModel`.
HEADS = ("order", "level", "error")

#: One of the teachers' targets is ``log(1 + SCALE * s)`` of the log slowdown s over the problem's best: about
#: proportional to s for the near-best that a ranking is about, and compressed for candidates that are out of question.
SLOWDOWN_SCALE = 5.0

#: Predictions of a compressed slowdown beyond this (a factor of e**80) are cut, so that nothing overflows.
_MOST_COMPRESSED = 6.0


def compress(slowdown_log: np.ndarray) -> np.ndarray:
    """Log slowdown over the problem's best -> compressed slowdown."""
    return np.log1p(SLOWDOWN_SCALE * slowdown_log)


def expand(compressed: np.ndarray) -> np.ndarray:
    """The inverse of :func:`compress`: a log slowdown, float64."""
    return np.expm1(np.minimum(np.asarray(compressed, dtype=np.float64), _MOST_COMPRESSED)) / SLOWDOWN_SCALE


def relative_log(forests: Mapping[str, Forest], features: np.ndarray) -> np.ndarray:
    """Log latency of one problem's candidates, up to a constant of the problem: float64 [rows]."""
    return forests["order"].predict(features)
