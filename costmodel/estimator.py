"""The estimator: gradient-boosted trees over features, in scikit-learn's style. Fitting needs xgboost; see forest.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelcast.costmodel.forest import Forest
from kernelcast.costmodel.heads import combined, compress, relative_log
from kernelcast.errors import MissingExtraError, ModelError

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils.validation import check_is_fitted
except ImportError as _error:
    raise MissingExtraError("scikit-learn", "train", "Fitting a cost model") from _error

#: Trees of the head that predicts a problem's overall level, and of the one that predicts the error.
_LEVEL_TREES = 150
_ERROR_TREES = 60

#: Standard deviation of the error of a difference where there are too few problems to leave some out.
_UNKNOWN_ERROR = 0.15

#: Fewer values than this in the feature matrix are fitted on one thread.
_FEW_VALUES = 2_000_000
#: A candidate r times slower than the problem's best counts ``r ** -_ERROR_FOCUS`` in the error head.
_ERROR_FOCUS = 1.0
#: Added to squared errors before their logarithm is taken, which 0 has none of.
_LEAST_SQUARE = 1e-6


class CostModel(RegressorMixin, BaseEstimator):
    """Predicts the log latency of candidates, and so ranks them.

    Four heads share one feature matrix:

    * ``relative`` predicts log latency less its mean over the problem: the shape's own level, by far the largest part
      of the variance, cannot hide the differences between candidates.
    * ``slowdown`` predicts the compressed log slowdown over the problem's best, and so spends its splits on the
      candidates that may be the best. The order is by the mean of the two, :func:`kernelcast.costmodel.heads.combined`.
    * ``level`` predicts log latency as it is; its mean over a problem's candidates sets the level.
    * ``error`` predicts how far a predicted difference is off, fitted on problems that were left out in turn.

    Args:
        n_estimators: trees of each of the first two heads.
        max_depth: depth of their trees.
        learning_rate: shrinkage.
        min_child_weight: least sum of weights in a leaf.
        subsample: share of the rows that each tree sees.
        colsample_bytree: share of the features that each tree sees.
        reg_lambda: L2 penalty of the leaves.
        focus: in the relative head a candidate r times slower than the problem's best has weight ``r ** -focus``; 0 weighs
            all alike.
        error_folds: folds of problems for the error head; below 2, or with fewer problems, one error for all.
        random_state: seed.
        n_jobs: threads of the fit; where None, all cores, or one for a small matrix, on which threads that wait for one
            another cost more than they save, most of all on a busy machine. The result does not depend on it.
    """

    def __init__(
        self,
        n_estimators: int = 250,
        max_depth: int = 8,
        learning_rate: float = 0.08,
        min_child_weight: float = 2.0,
        subsample: float = 0.8,
        colsample_bytree: float = 0.6,
        reg_lambda: float = 1.0,
        focus: float = 0.0,
        error_folds: int = 3,
        random_state: int = 0,
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

    def fit(self, X: np.ndarray, y: np.ndarray, groups: np.ndarray) -> CostModel:
        """Fit the four heads.

        Args:
            X: float32 [rows, features]; NaN is a missing value.
            y: log latency [rows], natural logarithm of microseconds, finite.
            groups: [rows] the problem of each row, in any order and of any type that numpy sorts.

        Raises:
            ModelError: lengths differ, a target is not finite, a feature is infinite, or no problem has two candidates
                to compare.
        """
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
        _, group = np.unique(groups, return_inverse=True)
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
        self.boosters_: dict[str, Any] = {}
        self.boosters_ |= self._boost_order(compared, relative, slowdown, self.n_estimators)
        self.boosters_["level"] = self._boost(
            X,
            y - y.mean(),
            None,
            _LEVEL_TREES,
            self.random_state,
            learning_rate=0.1,
            max_depth=min(self.max_depth, 6),
        )
        self.level_mean_ = float(y.mean())
        self._fit_error(compared, relative, slowdown, compared_group)
        self.forests_ = {
            name: Forest.from_xgboost_json(bytes(booster.save_raw("json")))
            for name, booster in self.boosters_.items()
        }
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Log latency of rows that are all of one problem, up to a constant of the problem: [rows]."""
        check_is_fitted(self, "forests_")
        return relative_log(self.forests_, np.asarray(X, dtype=np.float32))

    def _boost(
        self,
        X: np.ndarray,
        target: np.ndarray,
        weights: np.ndarray | None,
        trees: int,
        seed: int,
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
            "nthread": self.n_jobs or (1 if X.size < _FEW_VALUES else 0),
            **changes,
        }
        return xgboost.train(
            parameters, xgboost.DMatrix(X, label=target, weight=weights), num_boost_round=trees
        )

    def _boost_order(
        self, X: np.ndarray, relative: np.ndarray, slowdown: np.ndarray, trees: int
    ) -> dict[str, Any]:
        """The two heads that decide the order."""
        weights = np.exp(-self.focus * slowdown) if self.focus else None
        return {
            "relative": self._boost(X, relative, weights, trees, self.random_state),
            "slowdown": self._boost(X, compress(slowdown), None, trees, self.random_state),
        }

    def _fit_error(
        self, X: np.ndarray, relative: np.ndarray, slowdown: np.ndarray, group: np.ndarray
    ) -> None:
        """Fit the log of the error of a difference on problems left out, then scale it to be a standard deviation."""
        import xgboost

        counts = np.bincount(group)
        # What matters is the error among the candidates that may be chosen.
        weights = np.exp(-_ERROR_FOCUS * slowdown)
        folds = min(self.error_folds, len(counts))
        if folds < 2:
            square = np.full(len(X), _UNKNOWN_ERROR**2)
        else:
            fold = np.random.default_rng(self.random_state).permutation(len(counts))[group] % folds
            residual = np.empty(len(X))
            for held in range(folds):
                out = fold == held
                heads = self._boost_order(
                    X[~out], relative[~out], slowdown[~out], max(self.n_estimators // 2, 1)
                )
                left = xgboost.DMatrix(X[out])
                residual[out] = combined(heads["relative"].predict(left), heads["slowdown"].predict(left))
                residual[out] -= relative[out]
            # The mean over the problem's other candidates j of (residual_i - residual_j)^2, from sums over the problem.
            residual -= (np.bincount(group, weights=residual) / counts)[group]
            spread = np.bincount(group, weights=residual**2) / counts
            square = (counts / (counts - 1))[group] * (residual**2 + spread[group])
        size = 0.5 * np.log(square + _LEAST_SQUARE)
        self.error_mean_ = float(np.average(size, weights=weights))
        self.boosters_["error"] = self._boost(
            X, size - self.error_mean_, weights, _ERROR_TREES, self.random_state, learning_rate=0.1, max_depth=5,
            min_child_weight=20.0,
        )  # fmt: skip
        predicted = self.error_mean_ + self.boosters_["error"].predict(xgboost.DMatrix(X)).astype(np.float64)
        ratio = np.average(square / np.exp(2.0 * predicted), weights=weights)
        # The mean of log |error| lies below the log of its standard deviation: shift so that standardised errors have 1.
        self.error_mean_ += 0.5 * float(np.log(max(ratio, _LEAST_SQUARE)))
