"""The estimator: gradient-boosted trees over features, in scikit-learn's style. Fitting needs xgboost; see forest.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType
from typing import Any

import numpy as np

from kernelcast.costmodel.forest import MAX_DEPTH, Forest
from kernelcast.costmodel.heads import combined, compress, estimated_log, relative_log
from kernelcast.costmodel.uncertainty import ErrorHead, fit_error, folds_of
from kernelcast.errors import MissingExtraError, ModelError

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted
except ImportError as _error:
    raise MissingExtraError("scikit-learn", "train", "Fitting a cost model") from _error

#: Size of the head that predicts a problem's overall level.
_LEVEL_TREES = 20
_SMALL_DEPTH = 5
_SMALL_RATE = 0.3

#: A candidate r times slower than the problem's best counts ``r ** -_MILD`` where compressed slowdowns are predicted.
_MILD = 1.0
#: No leaf needs more than this share of all weight: with few problems the slow candidates together weigh next to nothing.
_LEAST_SHARE = 0.005
#: Between the seeds of the heads, so that models of neighbouring seeds share none.
_SEED_STEP = 100_003
#: Models that leave problems out for the error have this share of the trees.
_ERROR_SHARE = 0.5

#: Fewer values than this in the feature matrix are fitted on one thread.
_FEW_VALUES = 2_000_000


@dataclass(frozen=True)
class _Range:
    """What a parameter may be: a number from ``least``, or above it, to ``most``, or of one of the types in ``also``."""

    least: float
    most: float
    above: bool = False
    whole: bool = False
    also: tuple[type, ...] = ()

    def holds(self, value: Any) -> bool:
        if isinstance(value, self.also):
            return True
        number = isinstance(value, Integral if self.whole else Real) and not isinstance(value, bool)
        return number and (value > self.least if self.above else value >= self.least) and value <= self.most

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        span = f"above {self.least} and at most" if self.above else f"from {self.least} to"
        other = "".join(f", or {'None' if each is NoneType else each.__name__}" for each in self.also)
        return f"{kind} {span} {self.most}{other}"


#: Of each parameter of :class:`CostModel`.
_RANGES = {
    "n_estimators": _Range(1, 10_000, whole=True),
    "max_depth": _Range(1, MAX_DEPTH, whole=True),
    "learning_rate": _Range(0, 1, above=True),
    "min_child_weight": _Range(0, 10**9),
    "subsample": _Range(0, 1, above=True),
    "colsample_bytree": _Range(0, 1, above=True),
    "reg_lambda": _Range(0, 10**9),
    "focus": _Range(0, 100),
    "error_folds": _Range(0, 1000, whole=True),
    # What numpy's RandomState takes, too.
    "random_state": _Range(0, 2**32 - 1, whole=True, also=(NoneType, np.random.RandomState)),
    "n_jobs": _Range(-1, 1024, whole=True, also=(NoneType,)),
}


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse values that are out of range, of all parameters of :class:`CostModel`.

    Raises:
        ModelError: names the parameter, its value and what it must be.
    """
    for name, allowed in _RANGES.items():
        if not allowed.holds(parameters[name]):
            raise ModelError(f"{name} is {parameters[name]!r}; it must be {allowed}.")


def differences(group: np.ndarray, target: np.ndarray, weights: np.ndarray) -> Callable[..., Any]:
    """An objective for xgboost: the weighted squared error of differences within a problem.

    A constant added to the predictions of one problem changes nothing, so no split is spent on the levels of problems.

    Args:
        group: number of the problem of each row, from 0 without gaps: [rows].
        target: what to predict up to a constant of the problem: [rows].
        weights: above 0: [rows].
    """
    total = np.bincount(group, weights=weights)

    def objective(predicted: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
        off = predicted - target
        return weights * (off - (np.bincount(group, weights=weights * off) / total)[group]), weights

    return objective


class CostModel(RegressorMixin, BaseEstimator):
    """Predicts the log latency of candidates, and so ranks them.

    The order is the mean of three forests. All learn differences within a problem alone: the shape's own level, by far the
    largest part of the variance, cannot hide them.

    * ``difference`` predicts log latency up to a constant of the problem.
    * ``slowdown`` predicts the compressed log slowdown over the problem's best, and so spends its splits on candidates that
      may be the best.
    * ``remainder`` predicts what an analytic estimate of the time leaves out, which holds for shapes that were never
      measured as well. Without an estimate among the features it is left out.

    Two more heads share the feature matrix:

    * ``level`` predicts log latency as it is; its mean over a problem's candidates sets the level.
    * ``error`` predicts how far a predicted difference is off, fitted on problems that were left out in turn.

    Args:
        n_estimators: trees of each forest of the order.
        max_depth: depth of its trees.
        learning_rate: its shrinkage.
        min_child_weight: least sum of weights in a leaf.
        subsample: share of the rows that each tree sees.
        colsample_bytree: share of the features that each tree sees.
        reg_lambda: L2 penalty of the leaves.
        focus: where differences are predicted, a candidate r times slower than the problem's best has the weight
            ``r ** -focus``; 0 weighs all alike.
        error_folds: folds of problems for the error head; below 2, or with fewer problems, one error for all.
        random_state: seed. As everywhere in scikit-learn, None draws one from numpy's global state, and a ``RandomState``
            from itself; ``seed_`` is the one that was taken.
        n_jobs: threads of the fit; where None, all cores, or one for a small matrix, on which threads that wait for one
            another cost more than they save, most of all on a busy machine. The result does not depend on it.
    """

    def __init__(
        self,
        n_estimators: int = 120,
        max_depth: int = 7,
        learning_rate: float = 0.3,
        min_child_weight: float = 2.0,
        subsample: float = 0.8,
        colsample_bytree: float = 0.4,
        reg_lambda: float = 1.0,
        focus: float = 3.0,
        error_folds: int = 3,
        random_state: int | np.random.RandomState | None = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.max_depth = max_depth
        self.learning_rate = learning_rate
        self.min_child_weight = min_child_weight
        self.subsample = subsample
        self.colsample_bytree = colsample_bytree
        self.reg_lambda = reg_lambda
        self.focus = focus
        self.error_folds = error_folds
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(
        self,
        X: np.ndarray,
        y: np.ndarray,
        groups: np.ndarray,
        estimate: int | None = None,
        sample_weight: np.ndarray | None = None,
        clusters: np.ndarray | None = None,
    ) -> CostModel:
        """Fit all heads.

        Args:
            X: float32 [rows, features]; NaN is a missing value.
            y: log latency [rows], natural logarithm of microseconds, finite.
            groups: [rows] the problem of each row, in any order and of any type that numpy sorts.
            estimate: the column that holds an estimate of the time, log2 and up to a constant of the problem; None without.
            sample_weight: [rows] what each row counts, above 0; all alike where None.
            clusters: [rows] numbers of problems that are left out together when the error is fitted; each problem alone
                where None.

        Raises:
            ModelError: a parameter is out of range, lengths differ, there is no column ``estimate``, a weight is not positive, a
                target is not finite, a feature is infinite, or no problem has two candidates to compare.
        """
        check_parameters(self.get_params())
        X, y, group = _checked(X, y, groups)
        if estimate is not None and not (isinstance(estimate, Integral) and 0 <= estimate < X.shape[1]):
            raise ModelError(f"The estimate is column {estimate!r}; X has the columns 0 to {X.shape[1] - 1}.")
        weight = np.ones(len(X)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        if weight.shape != y.shape or not (np.isfinite(weight) & (weight > 0)).all():
            raise ModelError(
                f"The weights are {weight.shape}; there must be one above 0 for each of the {len(X)} rows."
            )
        together = group if clusters is None else np.asarray(clusters)
        if together.shape != y.shape:
            raise ModelError(
                f"The clusters are {together.shape}; there must be one for each of the {len(X)} rows."
            )
        counts = np.bincount(group) if len(group) else np.zeros(1)
        if counts.max() < 2:
            raise ModelError(
                "No problem has two measured candidates, so there is nothing to compare. Collect more."
            )

        mean = np.bincount(group, weights=y) / counts
        best = np.full(len(counts), np.inf)
        np.minimum.at(best, group, y)
        # A candidate alone in its problem is its own mean: it says nothing of differences, only of the level.
        pairs = counts[group] > 1
        compared, relative = X[pairs], (y - mean[group])[pairs]
        slowdown = (y - best[group])[pairs]
        _, compared_group = np.unique(group[pairs], return_inverse=True)

        self.n_features_in_ = X.shape[1]
        self.seed_ = (
            int(self.random_state)
            if isinstance(self.random_state, Integral)
            else int(check_random_state(self.random_state).randint(2**31))
        )
        self.boosters_: dict[str, Any] = {}
        self.estimate_ = estimate
        self.boosters_ |= self._fit_order(
            compared, relative, slowdown, compared_group, weight[pairs], self.n_estimators
        )
        self.boosters_["level"] = self._boost(
            X, y - y.mean(), weight, _LEVEL_TREES, self.seed_, learning_rate=_SMALL_RATE, max_depth=_SMALL_DEPTH,
        )  # fmt: skip
        self.level_mean_ = float(y.mean())
        error = self._fit_error(compared, relative, slowdown, compared_group, weight[pairs], together[pairs])
        self.boosters_["error"], self.error_mean_ = error.booster, error.mean
        self.left_out_ = None if error.left_out is None else error.left_out.over(pairs)
        self.forests_ = {
            name: Forest.from_xgboost_json(bytes(booster.save_raw("json")))
            for name, booster in self.boosters_.items()
        }
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Log latency of rows that are all of one problem, up to a constant of the problem: [rows]."""
        check_is_fitted(self, "forests_")
        return relative_log(self.forests_, np.asarray(X, dtype=np.float32), self.estimate_)

    def score(self, X: np.ndarray, y: np.ndarray, groups: np.ndarray) -> float:
        """How good the first of each problem's ranking is: efficiency at 1, the geometric mean over the problems.

        That of a problem is its best latency over that of the row with the least prediction, the first of those that are
        equal: 1 is perfect. (scikit-learn's R² would mean nothing, as predictions are up to a constant of the problem.)

        Args:
            X: float32 [rows, features].
            y: log latency [rows], as for :meth:`fit`.
            groups: [rows] the problem of each row.

        Raises:
            ModelError: lengths differ, there is no row, a latency is not finite, or a feature is infinite.
        """
        X, y, group = _checked(X, y, groups)
        if not len(y):
            raise ModelError("There is no row to judge the model by.")
        ranked, fastest = np.lexsort((self.predict(X), group)), np.lexsort((y, group))
        start = np.flatnonzero(np.diff(group[ranked], prepend=-1))
        return float(np.exp((y[fastest[start]] - y[ranked[start]]).mean()))

    def _boost(
        self,
        X: np.ndarray,
        target: np.ndarray,
        weights: np.ndarray | None,
        trees: int,
        seed: int,
        *,
        objective: Callable[..., Any] | None = None,
        **changes: Any,
    ) -> Any:
        try:
            import xgboost
        except ImportError as error:
            raise MissingExtraError("xgboost", "train", "Fitting a cost model") from error
        parameters = {
            "objective": "reg:squarederror",
            "tree_method": "hist",
            "base_score": 0.0,
            "max_depth": self.max_depth,
            "learning_rate": self.learning_rate,
            "min_child_weight": self.min_child_weight,
            "subsample": self.subsample,
            "colsample_bytree": self.colsample_bytree,
            "reg_lambda": self.reg_lambda,
            "seed": seed,
            "nthread": self._threads(X),
            **changes,
        }
        return xgboost.train(
            parameters,
            xgboost.DMatrix(X, label=target, weight=weights),
            num_boost_round=trees,
            obj=objective,
        )

    def _fit_order(
        self,
        X: np.ndarray,
        relative: np.ndarray,
        slowdown: np.ndarray,
        group: np.ndarray,
        weight: np.ndarray,
        trees: int,
    ) -> dict[str, Any]:
        """The heads that decide the order, by name."""
        sharp = weight * np.exp(-self.focus * slowdown)
        least = min(self.min_child_weight, _LEAST_SHARE * float(sharp.sum()))
        targets = {"difference": relative, "slowdown": compress(slowdown)}
        if self.estimate_ is not None:
            targets["remainder"] = relative - estimated_log(X, self.estimate_)
        found = {}
        for place, (name, target) in enumerate(targets.items()):
            by_level = name == "slowdown"
            found[name] = self._boost(
                X,
                target,
                weight * np.exp(-_MILD * slowdown) if by_level else None,
                trees,
                self.seed_ + _SEED_STEP * (place + 1),
                objective=None if by_level else differences(group, target, sharp),
                min_child_weight=least,
            )
        return found

    def _fit_error(
        self,
        X: np.ndarray,
        relative: np.ndarray,
        slowdown: np.ndarray,
        group: np.ndarray,
        weight: np.ndarray,
        clusters: np.ndarray,
    ) -> ErrorHead:
        """Fit the error of a difference on problems that were left out in turn."""
        import xgboost

        def predict_left_out(out: np.ndarray) -> np.ndarray:
            fitted = self._fit_order(
                X[~out],
                relative[~out],
                slowdown[~out],
                np.unique(group[~out], return_inverse=True)[1],
                weight[~out],
                max(round(_ERROR_SHARE * self.n_estimators), 1),
            )
            rows = xgboost.DMatrix(X[out])
            said = np.array([booster.predict(rows) for booster in fitted.values()], dtype=np.float64)
            return combined(said, X[out], self.estimate_)

        return fit_error(
            X, relative, slowdown, weight, group,
            folds_of(clusters, group, self.error_folds, self.seed_),
            predict_left_out,
            seed=self.seed_,
            threads=self._threads(X),
        )  # fmt: skip

    def _threads(self, X: np.ndarray) -> int:
        return self.n_jobs or (1 if X.size < _FEW_VALUES else 0)


def _checked(X: np.ndarray, y: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X as float32, y as float64, and the number of the problem of each row, from 0 without gaps."""
    with np.errstate(over="ignore"):
        X = np.ascontiguousarray(X, dtype=np.float32)
    y = np.asarray(y, dtype=np.float64)
    groups = np.asarray(groups)
    if X.ndim != 2 or y.shape != (len(X),) or groups.shape != (len(X),):
        raise ModelError(
            f"X is {X.shape}, y {y.shape}, groups {groups.shape}; their first lengths must be equal."
        )
    if not np.isfinite(y).all():
        raise ModelError(
            f"{int((~np.isfinite(y)).sum())} latencies are not finite; leave failures out of a fit."
        )
    if np.isinf(X).any():
        raise ModelError(
            f"{int(np.isinf(X).sum())} features are infinite in float32; NaN stands for a missing one."
        )
    return X, y, np.unique(groups, return_inverse=True)[1]
