"""How many candidates to measure: the fewest whose expected regret a caller can bear. numpy alone.

The regret of measuring a set is log(best of the set / best of all). Its expectation follows from the predicted log
latencies and the errors of their differences (:func:`expected_regrets`). What a model believes of itself is then mapped to
what came true on problems left out of its fit (:class:`Calibration`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.costmodel.novelty import Reach
from kernelcast.errors import ArtifactError, ModelError

if TYPE_CHECKING:
    from kernelcast.costmodel.prediction import Prediction

#: Candidates beyond this place of the predicted order (the default apart) hardly change the expectation.
CONSIDERED = 48
#: Draws of every candidate's error.
_DRAWS = 256
#: No draw is further from its mean, in standard deviations.
_REACH = 4.0
#: The most rows that are measured where the caller names no number.
MOST = 10

#: What :func:`choose` can promise.
BOUNDS = ("mean", "problem")
#: Expected regrets below this are nothing, in log latency.
NOTHING = 1e-7
#: Keeps logarithms finite.
_SMALLEST = 1e-12
#: Further than any regret is from a curve's end, in logarithms.
_FAR = 60.0
#: Factor on the errors of a problem beyond training where it was not measured.
UNKNOWN_WIDENING = 1.5
#: The fields of :class:`Calibration` that are curves.
_CURVES = ("alone", "several", "bounds")


@dataclass(frozen=True, eq=False)
class Shortlist:
    """What to measure of one problem.

    Attributes:
        rows: row numbers, the default first (where there is one), then in predicted order: intp, at least one unless the
            prediction has none. Also the order that breaks ties.
        expected_regret: expected share of the selected candidate's time that measuring everything would save; NaN where
            nothing is known of the candidates.
        curve: float64 [up to ``most``]: the same of measuring the first 1, 2, ... of the order; it never rises.
    """

    rows: np.ndarray
    expected_regret: float
    curve: np.ndarray


@dataclass(frozen=True)
class Curve:
    """A curve through points, straight between them in logarithms; beyond its ends in proportion.

    Attributes:
        xs: rising, above 0.
        ys: as many, above 0 and never falling.

    Raises:
        ArtifactError: they are not so.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    _logs: tuple[np.ndarray, np.ndarray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positive = all(math.isfinite(value) and value > 0 for value in (*self.xs, *self.ys))
        rising = all(a < b for a, b in pairwise(self.xs)) and all(a <= b for a, b in pairwise(self.ys))
        if not (len(self.xs) == len(self.ys) >= 1 and positive and rising):
            raise ArtifactError("A curve of a model's calibration is no curve that rises.")
        # In proportion beyond the ends is a slope of 1 in logarithms.
        logs = [np.log(np.array(values)) for values in (self.xs, self.ys)]
        far = tuple(np.concatenate([[at[0] - _FAR], at, [at[-1] + _FAR]]) for at in logs)
        object.__setattr__(self, "_logs", far)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The curve at some values, of any shape."""
        return np.exp(np.interp(np.log(np.maximum(values, _SMALLEST)), *self._logs))


@dataclass(frozen=True)
class Calibration:
    """What came true, on problems left out of a fit, of the regrets that the model expected. All in log latency.

    Attributes:
        alone: regret expected of measuring the first row alone (most often the default) -> mean regret where so much was
            expected, and two standard errors of it.
        several: the same of measuring two rows and more.
        bounds: mean regret over problems, and two standard errors of it -> the bound on each problem's expected regret that came to
            it.
        widening: factor on the errors of a problem beyond training.
        problems: how many left-out problems are behind it.

    Raises:
        ArtifactError: ``widening`` is below 1 or not finite.
    """

    alone: Curve
    several: Curve
    bounds: Curve
    widening: float
    problems: int

    def __post_init__(self) -> None:
        if not 1 <= self.widening < math.inf:
            raise ArtifactError(
                f"A model widens errors by {self.widening}; it must be a number of at least 1."
            )

    def truly(self, believed: np.ndarray) -> np.ndarray:
        """Curves as :func:`expected_regrets` gives them, [..., ks] -> what they come to; they never rise."""
        came = self.several(believed)
        came[..., :1] = self.alone(believed[..., :1])
        return np.minimum.accumulate(came, axis=-1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` is the inverse."""
        curves = {name: getattr(self, name) for name in _CURVES}
        points = {name: [list(curve.xs), list(curve.ys)] for name, curve in curves.items()}
        return {**points, "widening": self.widening, "problems": self.problems}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Read what :meth:`to_dict` gave.

        Raises:
            ArtifactError: a field is missing, of another type, or contradicts another.
        """
        try:
            curves = {}
            for name in _CURVES:
                xs, ys = data[name]
                curves[name] = Curve(tuple(map(float, xs)), tuple(map(float, ys)))
            return cls(**curves, widening=float(data["widening"]), problems=int(data["problems"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArtifactError(
                f"Not the calibration of expected regrets ({type(error).__name__}: {error})."
            ) from error


@dataclass(frozen=True, eq=False)
class Adaptive:
    """What a model knows of its own limits, beside the error of each difference.

    Attributes:
        reach: what it was trained on.
        calibration: None where too few problems could be left out to tell.
    """

    reach: Reach
    calibration: Calibration | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` is the inverse."""
        calibration = None if self.calibration is None else self.calibration.to_dict()
        return {"reach": self.reach.to_dict(), "calibration": calibration}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Adaptive:
        """Read what :meth:`to_dict` gave.

        Raises:
            ArtifactError: a field is missing, of another type, or contradicts another.
        """
        try:
            reach, calibration = Reach.from_dict(data["reach"]), data["calibration"]
        except (KeyError, TypeError) as error:
            raise ArtifactError(
                f"Not what a model knows of its limits ({type(error).__name__}: {error})."
            ) from error
        return cls(reach, None if calibration is None else Calibration.from_dict(calibration))


def choose(
    prediction: Prediction,
    *,
    default: int | None,
    target_regret: float,
    most: int = MOST,
    bound: str = "mean",
) -> Shortlist:
    """The rows to measure: the default, and as few of the first others as keep the expected regret low.

    Args:
        prediction: of the candidates of one problem.
        default: the default's row, which is always among those measured; None where there is none.
        target_regret: the share of its time that the selected candidate may lose to not measuring everything, such as
            0.005.
        most: the most rows, the default included; where they are not enough, the target is not kept.
        bound: ``"mean"``: the mean over problems stays under the target if they are like those in training; easy problems
            leave room for others. ``"problem"``: the expected regret of this very problem stays under it, and so does the
            mean over harder ones than training had; more are measured.

    Raises:
        ModelError: a target that is not between 0 and 1, ``most`` below 1, an unknown ``bound``, no such row, or a prediction
            without errors.
    """
    if not 0 < target_regret < 1:
        raise ModelError(f"The target regret is {target_regret}; it must lie between 0 and 1, such as 0.005.")
    if most < 1:
        raise ModelError(f"At most {most} rows are to be measured; take at least 1.")
    if bound not in BOUNDS:
        raise ModelError(f"The bound is {bound!r}; it must be one of {', '.join(BOUNDS)}.")
    order = sequence(prediction, default)
    known = prediction.covered[order]
    ranked = order[known]
    log_latency, error_log = prediction.log_latency[ranked], prediction.error_log[ranked]
    if np.isnan(error_log).any():
        raise ModelError("The prediction was made without its uncertainty; ask for it with uncertainty=True.")
    curve = np.full(min(most, len(order)), np.nan)
    if len(ranked):
        calibration = prediction.calibration
        widening = UNKNOWN_WIDENING if calibration is None else calibration.widening
        if widening > 1 and prediction.novel:
            error_log = error_log * widening
        believed = expected_regrets(log_latency, error_log, most)
        if calibration is not None:
            believed = calibration.truly(believed)
        # Of rows that the model does not cover nothing is expected; only the default can stand before those that it does.
        skipped = int(np.argmax(known))
        curve[skipped:] = believed[-1]
        curve[skipped : skipped + len(believed)] = believed[: len(curve) - skipped]
    limit = -math.log1p(-target_regret)
    if bound == "mean" and prediction.calibration is not None:
        # Never less than what each problem may have: of few problems the errors of the mean alone may be more than the target.
        limit = max(float(prediction.calibration.bounds(np.array(limit))), limit)
    enough = np.flatnonzero(curve <= limit)
    count = int(enough[0]) + 1 if len(enough) else len(curve)
    shares = -np.expm1(-curve)
    return Shortlist(order[:count], float(shares[count - 1]) if count else math.nan, shares)


def sequence(prediction: Prediction, default: int | None) -> np.ndarray:
    """All rows in the order in which they are measured: the default, then as predicted.

    Raises:
        ModelError: there is no row ``default``.
    """
    order = prediction.order()
    if default is None:
        return order
    if not 0 <= default < len(order):
        raise ModelError(f"The default is said to be row {default} of {len(order)}.")
    return np.concatenate([[default], order[order != default]])


def expected_regrets(log_latency: np.ndarray, error_log: np.ndarray, most: int = MOST) -> np.ndarray:
    """Expected log(best of the first k / best of all) for k = 1, 2, ..., by draws of independent normal errors.

    What candidates of a problem have in common cancels in their differences, so each has an error of its own: by
    1/sqrt(2) of that of a difference. The draws are the same in every call.

    Args:
        log_latency: [rows] predicted, in the order in which the rows are measured.
        error_log: [rows] standard deviation of the error of a difference to another row.
        most: how many k, at most.

    Returns:
        float64 [min(most, rows)], never rising.
    """
    mean = log_latency[: CONSIDERED + 1] - log_latency.min(initial=np.inf)
    spread = error_log[: CONSIDERED + 1] * math.sqrt(0.5)
    if len(mean) > most:
        # Those that do not reach the likely best need no draws.
        near = mean - _REACH * spread <= (mean + _REACH * spread).min()
        near[:most] = True
        mean, spread = mean[near], spread[near]
    drawn = _draws()[: len(mean)] * spread.astype(np.float32)[:, None]
    drawn += mean.astype(np.float32)[:, None]
    best_so_far = np.minimum.accumulate(drawn[:most], axis=0)
    best = best_so_far[-1]
    if len(drawn) > most:
        best = np.minimum(best, drawn[most:].min(axis=0))
    best_so_far -= best
    return best_so_far.mean(axis=1).astype(np.float64)


@cache
def _draws() -> np.ndarray:
    """Standard normal numbers [candidates, draws], spread evenly; no two candidates' are correlated."""
    normal = NormalDist()
    even = np.array([normal.inv_cdf((draw + 0.5) / _DRAWS) for draw in range(_DRAWS)])
    rows = np.random.default_rng(0).permuted(np.tile(even, (CONSIDERED + 1, 1)), axis=1)
    apart = np.linalg.solve(np.linalg.cholesky(np.cov(rows)), rows)
    return (apart - apart.mean(axis=1, keepdims=True)).astype(np.float32)
